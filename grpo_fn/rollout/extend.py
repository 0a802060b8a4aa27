"""Extends decoding rows by given tokens: one prefill over these rows, into their caches.

A row whose turn has ended is parked: its caches are taken out of the batch. Later it is resumed with others,
each with its own tokens (ragged), and decoding continues after them. Nothing is computed twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.caches.prefix_cache import Layout, Pair, PrefixCache, fork, keep_prefix_rows
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.decode_step import CacheSteps, Steps
from grpo_fn.rollout.prefill import Prefill, computed, prefill
from grpo_fn.trees import arrays_of, map_arrays, on_host

EXTEND_TOKENS = 8192  # new tokens of all rows in a call, including padding: limits the memory of long ones
LEAST_EXTENSION = 16  # new tokens of a row and call, however many rows there are

# Steps, the rows that they decode, logits [B,V] of the next token.
Resumed = tuple[Steps, list[int], mx.array]


class Extender(Protocol):
    """Parks the rows of a batch and resumes them."""

    sees_each_step: bool  # a row has to be parked before anything is fed after its last token

    def park(self, steps: Any, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        """Take the caches of rows out of the batch.

        Args:
            steps: their decoding steps; the batch itself does not change.
            places, rows: their places in the batch, and their numbers.
            fed: tokens of this turn that each row was fed and keeps.
            step: tokens that all rows were fed since these steps began.
        """

    def drop(self, row: int) -> None:
        """Forget a parked row."""

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """Feed parked rows their tokens, at least one each; returns the steps that continue from there."""
        ...


class SharedPromptRows:
    """`Extender` of rows over one copy of each prompt; the prompts are always kept once."""

    sees_each_step = False  # excess tokens are masked

    def __init__(
        self, policy: Policy, model: nn.Module, caches: Caches, lengths: Sequence[int], rows: Sequence[int]
    ) -> None:
        """After a prefill.

        Args:
            policy, model: the policy, and its module as `Policy.bound` gives it.
            caches: plain ones after P prompts, padded on the right.
            lengths: tokens of each prompt.
            rows: numbers of all rows, grouped by prompt, the same number for each prompt.
        """
        self._policy, self._model, self._lengths = policy, model, list(lengths)
        group = len(rows) // len(lengths)
        self._prompt_of = {row: place // group for place, row in enumerate(rows)}
        forked = fork(caches, self._lengths, group)
        self._prompts = [cache.prompt for cache in forked]
        self.first = CacheSteps(model, forked, keep_prefix_rows)
        self._parked: dict[int, list[Pair]] = {}  # own keys and values [1,K,T,D] of each layer

    def park(self, steps: CacheSteps, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        seen_bt = steps.caches[0].layout.own_seen_bt
        seen = None if seen_bt is None else on_host(seen_bt)
        own = [cache.own for cache in steps.caches]
        before = own[0][0].shape[2] - step  # own places when these steps began
        for place, row, tokens in zip(places, rows, fed, strict=True):
            earlier = [t for t in range(before) if seen is None or seen[place][t]]
            index = mx.array([*earlier, *range(before, before + tokens)], mx.int32)
            self._parked[row] = [
                (keys[place : place + 1, :, index], values[place : place + 1, :, index])
                for keys, values in own
            ]
        mx.eval([self._parked[row] for row in rows])  # otherwise they would keep the batch's buffers

    def drop(self, row: int) -> None:
        del self._parked[row]

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """As `Extender`: all rows as one batch."""
        rows = [row for row in self._prompt_of if row in given]
        held = [self._parked.pop(row) for row in rows]
        lengths = [layers[0][0].shape[2] for layers in held]  # own tokens
        live = sorted({self._prompt_of[row] for row in rows})
        prompt_of, prompt_lengths = (
            [live.index(self._prompt_of[row]) for row in rows],
            [self._lengths[p] for p in live],
        )
        prompts = self._prompts
        if len(live) < len(self._lengths):
            which, longest = mx.array(live, mx.int32), max(prompt_lengths)
            prompts = [(keys[which, :, :longest], values[which, :, :longest]) for keys, values in prompts]

        def layout(seen: list[list[bool]]) -> Layout:
            """Of rows with as many own tokens as `lengths` says, at these places."""
            starts = [
                prompt_lengths[p] + own - len(seen[0]) for p, own in zip(prompt_of, lengths, strict=True)
            ]
            mask_bt = None if all(map(all, seen)) else mx.array(seen)
            return Layout.of(prompt_of, prompt_lengths, starts, mask_bt)

        seen = [[t < own for t in range(max(lengths))] for own in lengths]
        caches = [
            PrefixCache(prompt, layout(seen), _stacked(pairs))
            for prompt, *pairs in zip(prompts, *held, strict=True)
        ]
        tokens = [given[row] for row in rows]
        width = max(LEAST_EXTENSION, EXTEND_TOKENS // len(rows))
        last_bd: mx.array | None = None
        for start in range(0, max(map(len, tokens)), width):
            pieces = [list(row[start : start + width]) for row in tokens]
            most = max(map(len, pieces))
            padded = [[*piece, *[0] * (most - len(piece))] for piece in pieces]
            hidden_bed = self._policy.split.backbone(self._model)(mx.array(padded, mx.int32), cache=caches)
            ends_b = mx.array([len(piece) for piece in pieces])
            picked_bd = hidden_bed[mx.arange(len(rows)), mx.maximum(ends_b - 1, 0)]
            last_bd = picked_bd if last_bd is None else mx.where(ends_b[:, None] > 0, picked_bd, last_bd)
            lengths = [own + len(piece) for own, piece in zip(lengths, pieces, strict=True)]
            seen = [
                [*had, *(t < len(piece) for t in range(most))]
                for had, piece in zip(seen, pieces, strict=True)
            ]
            after = layout(seen)
            for cache in caches:
                cache.layout = after
            yield from computed([*(cache.state for cache in caches), last_bd])
        assert last_bd is not None
        steps = CacheSteps(self._model, caches, keep_prefix_rows)
        return [(steps, rows, self._policy.split.logits(self._model, last_bd))]


class CopiedPromptRows:
    """`Extender` of rows with caches of their own, of whatever kind the model has.

    Rows of a model that cannot take rows of different lengths are decoded one by one after their first turn.
    """

    def __init__(self, policy: Policy, model: nn.Module, caches: Caches) -> None:
        """`caches` are those after the prefill, a row for each completion."""
        from mlx_lm.models.cache import BatchKVCache, KVCache

        self._policy, self._model = policy, model
        # Windows and recurrent states cannot give back what they were fed.
        self.sees_each_step = not all(type(cache) in (KVCache, BatchKVCache) for cache in caches)
        self._parked: dict[int, Caches] = {}

    def park(self, steps: CacheSteps, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        for place, row, tokens in zip(places, rows, fed, strict=True):
            mine = [_row_of(cache, place) for cache in steps.caches]
            for cache in mine if step > tokens else ():
                cache.trim(step - tokens)
            self._parked[row] = mine
        # Otherwise they would keep the batch's buffers.
        mx.eval([list(arrays_of([cache.state for cache in self._parked[row]])) for row in rows])

    def drop(self, row: int) -> None:
        del self._parked[row]

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
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


def _stacked(pairs: Sequence[Pair]) -> Pair:
    """Keys and values [B,K,T,D] of a layer, from those of each row, padded on the right."""
    most = max(keys.shape[2] for keys, _ in pairs)
    keys, values = (
        mx.concatenate([mx.pad(x, [(0, 0), (0, 0), (0, most - x.shape[2]), (0, 0)]) for x in arrays])
        for arrays in zip(*pairs, strict=True)
    )
    return keys, values


def _row_of(cache: Any, place: int) -> Any:
    """A plain cache of one row of a batch."""
    if hasattr(cache, "left_padding") and hasattr(cache, "extract"):  # rows of different lengths
        return cache.extract(place)
    index = mx.array([place], mx.int32)
    state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)
    return type(cache).from_state(state)
