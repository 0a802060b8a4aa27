"""Extends decoding rows by given tokens: one prefill over these rows, into their caches.

A row whose turn has ended is parked: its caches are taken out of the batch. Later it is resumed with others,
each with its own tokens (ragged), and decoding continues after them. Nothing is computed twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.decode_step import CacheSteps
from grpo_fn.rollout.prefill import Prefill, prefill
from grpo_fn.trees import arrays_of, map_arrays

# Steps, the rows that they decode, logits [B,V] of the next token.
Resumed = tuple[CacheSteps, list[int], mx.array]


class Extender:
    """Parks the rows of a batch and resumes them; each has caches of its own, of whatever kind the model has.

    Rows of a model that cannot take rows of different lengths are decoded one by one after their first turn.

    Attributes:
        sees_each_step: whether a row has to be parked before anything is fed after its last token.
    """

    def __init__(self, policy: Policy, model: nn.Module, caches: Caches) -> None:
        """`caches` are those after the prefill, a row for each completion."""
        from mlx_lm.models.cache import BatchKVCache, KVCache

        self._policy, self._model = policy, model
        # Windows and recurrent states cannot give back what they were fed.
        self.sees_each_step = not all(type(cache) in (KVCache, BatchKVCache) for cache in caches)
        self._parked: dict[int, Caches] = {}

    def park(self, steps: Any, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        """Take the caches of rows out of the batch.

        Args:
            steps: their decoding steps over caches; the batch itself does not change.
            places, rows: their places in the batch, and their numbers.
            fed: tokens of this turn that each row was fed and keeps.
            step: tokens that all rows were fed since these steps began.
        """
        for place, row, tokens in zip(places, rows, fed, strict=True):
            mine = [_row_of(cache, place) for cache in steps.caches]
            for cache in mine if step > tokens else ():
                cache.trim(step - tokens)
            self._parked[row] = mine
        # Otherwise they would keep the batch's buffers.
        mx.eval([list(arrays_of([cache.state for cache in self._parked[row]])) for row in rows])

    def drop(self, row: int) -> None:
        """Forget a parked row."""
        del self._parked[row]

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """Feed parked rows their tokens, at least one each; returns the steps that continue from there."""
        rows = sorted(given)
        parts = [rows] if self._policy.takes_ragged else [[row] for row in rows]
        made: list[Resumed] = []
        for part in parts:
            found = [self._parked.pop(row) for row in part]
            caches = found[0]
            if self._policy.takes_ragged:
                caches = [type(layer[0]).merge(list(layer)) for layer in zip(*found, strict=True)]
            logits_bv, caches = yield from prefill(self._model, [given[row] for row in part], caches)
            mx.eval(logits_bv)
            made.append((CacheSteps(self._model, caches), part, logits_bv))
        return made


def _row_of(cache: Any, place: int) -> Any:
    """A plain cache of one row of a batch."""
    if hasattr(cache, "left_padding") and hasattr(cache, "extract"):  # rows of different lengths
        return cache.extract(place)
    index = mx.array([place], mx.int32)
    state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)
    return type(cache).from_state(state)
