"""Extends decoding rows by given tokens: one prefill over these rows, into their caches.

A row whose turn has ended is parked: its caches are taken out of the batch. Later it is resumed with others,
each with its own tokens (ragged), and decoding continues after them. Nothing is computed twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.extending_cache import ExtendingCache, Pair
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.caches.prefix_cache import Layout, PrefixCache, fork, keep_prefix_rows
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.decode_step import CacheSteps, Steps
from grpo_fn.rollout.prefill import Prefill, computed, prefill
from grpo_fn.trees import arrays_of, map_arrays

EXTEND_TOKENS = 8192  # new tokens of all rows in a call, including padding: limits the memory of long ones
LEAST_EXTENSION = 16  # new tokens of a row and call, however many rows there are
_SPARSE = 0.75  # own places are gathered if a row uses at most this share of them

Resumed = tuple[
    Steps, list[int], mx.array
]  # steps, the rows that they decode, logits [B,V] of the next token


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
        ...

    def drop(self, row: int) -> None:
        """Forget a parked row."""
        ...

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """Feed parked rows their tokens, at least one each; returns the steps that continue from there."""
        ...


class TurnSteps(CacheSteps):
    """Steps over one copy of each prompt, of rows that have own tokens from earlier turns."""

    def __init__(self, model: nn.Module, caches: list[PrefixCache], seen_bt: mx.array | None = None) -> None:
        """`seen_bt`: the valid own places of each row so far; None: there are none yet."""
        super().__init__(model, caches, keep_prefix_rows)
        self.seen_bt = seen_bt

    def keep_rows(self, rows: list[int]) -> None:
        """As `Steps`."""
        super().keep_rows(rows)
        if self.seen_bt is not None:
            self.seen_bt = self.seen_bt[mx.array(rows, mx.int32)]


@attrs.frozen(eq=False)
class _Block:
    """Rows that were parked together."""

    layers: list[Pair]  # keys and values [W,K,T,D]
    seen_wt: mx.array  # the valid places of each row

    def array(self, layer: int, which: int, like: list[Pair]) -> mx.array:
        """Keys (0) or values (1) of a layer; empty, in the shape of `like`, if no row has own tokens."""
        if self.layers:
            return self.layers[layer][which]
        return mx.repeat(like[layer][which][:1, :, :0], self.seen_wt.shape[0], axis=0)


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
        self._place = {row: place for place, row in enumerate(rows)}
        self._prompt_of = {row: place // group for place, row in enumerate(rows)}
        forked = fork(caches, self._lengths, group)
        self._prompts = [cache.prompt for cache in forked]
        self.first = TurnSteps(model, forked)
        self._parked: dict[int, tuple[_Block, int, int]] = {}  # block, place in it, own tokens
        self._own_tokens = dict.fromkeys(rows, 0)

    def park(self, steps: TurnSteps, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        """As `Extender`."""
        index = mx.array(places, mx.int32)
        before = 0 if steps.seen_bt is None else steps.seen_bt.shape[1]
        most = before + max(fed)
        layers = []
        if most:
            for cache in steps.caches:
                keys, values = cache.own
                layers.append((keys[index, :, :most], values[index, :, :most]))
        new_wt = mx.arange(max(fed))[None] < mx.array(fed)[:, None]
        parts = [new_wt] if steps.seen_bt is None else [steps.seen_bt[index], new_wt]
        block = _Block(layers, mx.concatenate(parts, axis=1))
        mx.eval(list(arrays_of(layers)), block.seen_wt)  # otherwise they would keep the batch's buffers
        for place, (row, tokens) in enumerate(zip(rows, fed, strict=True)):
            self._own_tokens[row] += tokens
            self._parked[row] = block, place, self._own_tokens[row]

    def drop(self, row: int) -> None:
        """As `Extender`."""
        del self._parked[row]

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """As `Extender`: all rows as one batch."""
        rows = sorted(given, key=self._place.__getitem__)
        own, seen_bt = self._joined(rows)
        live = sorted({self._prompt_of[row] for row in rows})
        layout = Layout.of(
            [live.index(self._prompt_of[row]) for row in rows], [self._lengths[p] for p in live]
        )
        prompts = self._prompts
        if len(live) < len(self._lengths):
            which, longest = mx.array(live, mx.int32), max(layout.lengths)
            prompts = [(keys[which, :, :longest], values[which, :, :longest]) for keys, values in prompts]
        position = [self._lengths[self._prompt_of[row]] + self._own_tokens[row] for row in rows]
        tokens = [given[row] for row in rows]
        width = max(LEAST_EXTENSION, EXTEND_TOKENS // len(rows))
        last_bd: mx.array | None = None
        for start in range(0, max(map(len, tokens)), width):
            pieces = [list(row[start : start + width]) for row in tokens]
            sizes = [len(piece) for piece in pieces]
            caches = [
                ExtendingCache(
                    prompt,
                    pair if seen_bt.shape[1] else None,
                    attrs.evolve(
                        layout, start=mx.array(position, mx.int32), suffix_seen=seen_bt[:, None, None, :]
                    ),
                )
                for prompt, pair in zip(prompts, own, strict=True)
            ]
            padded = [[*piece, *[0] * (max(sizes) - len(piece))] for piece in pieces]
            hidden_bed = self._policy.split.backbone(self._model)(mx.array(padded, mx.int32), cache=caches)
            picked_bd = hidden_bed[mx.arange(len(rows)), mx.maximum(mx.array(sizes) - 1, 0)]
            ends_here = mx.array([size > 0 for size in sizes])[:, None]
            last_bd = picked_bd if last_bd is None else mx.where(ends_here, picked_bd, last_bd)
            own = [_appended(pair, cache.new) for pair, cache in zip(own, caches, strict=True)]
            new_be = mx.arange(max(sizes))[None] < mx.array(sizes)[:, None]
            seen_bt = mx.concatenate([seen_bt, new_be], axis=1)
            position = [p + size for p, size in zip(position, sizes, strict=True)]
            yield from computed([*own, last_bd])
        assert last_bd is not None
        for row in rows:
            self._own_tokens[row] += len(given[row])
            del self._parked[row]
        places = seen_bt.shape[1]
        # Rows that are all of one length need no mask.
        full = all(self._own_tokens[row] == places for row in rows)
        one = full and len(set(position)) == 1
        whole = attrs.evolve(
            layout,
            start=position[0] - places if one else mx.array(position, mx.int32) - places,
            suffix_seen=None if full else seen_bt[:, None, None, :],
            later_turn=True,
        )
        made = [
            PrefixCache(*prompt, whole, pair)
            for prompt, pair in zip(prompts, own, strict=True)
            if pair is not None
        ]
        return [
            (TurnSteps(self._model, made, seen_bt), rows, self._policy.split.logits(self._model, last_bd))
        ]

    def _joined(self, rows: Sequence[int]) -> tuple[list[Pair | None], mx.array]:
        """Own keys and values [B,K,T,D] of each layer, and which places of them a row has [B,T]."""
        blocks = list({id(self._parked[row][0]): self._parked[row][0] for row in rows}.values())
        parts, order = [], []
        for block in blocks:
            mine = [row for row in rows if self._parked[row][0] is block]
            order += mine
            parts.append((block, mx.array([self._parked[row][1] for row in mine], mx.int32)))
        width = max(block.seen_wt.shape[1] for block in blocks)
        sort = mx.array([order.index(row) for row in rows], mx.int32)
        sorted_already = order == list(rows)

        def joined(arrays: list[mx.array], axis: int) -> mx.array:
            longer = []
            for (block, index), array in zip(parts, arrays, strict=True):
                if index.shape[0] < block.seen_wt.shape[0] or not sorted_already:
                    array = array[index]
                missing = width - array.shape[axis]
                pads = [(0, missing if a == axis else 0) for a in range(array.ndim)]
                longer.append(mx.pad(array, pads) if missing else array)
            whole = mx.concatenate(longer) if len(longer) > 1 else longer[0]
            return whole if sorted_already else whole[sort]

        seen_bt = joined([block.seen_wt for block in blocks], 1)
        if not width:
            return [None] * len(self._prompts), seen_bt
        like = next(block.layers for block in blocks if block.layers)
        own: list[Pair | None] = []
        for layer in range(len(self._prompts)):
            keys, values = (joined([block.array(layer, k, like) for block in blocks], 2) for k in (0, 1))
            own.append((keys, values))
        most = max(self._parked[row][2] for row in rows)
        if most > _SPARSE * width:
            return own, seen_bt
        place_t = mx.arange(width)
        index_bt = mx.argsort(mx.where(seen_bt, place_t, place_t + width), axis=1)[:, :most]
        seen_bt = mx.take_along_axis(seen_bt, index_bt, axis=1)
        return [None if pair is None else _gathered(pair, index_bt) for pair in own], seen_bt


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
        self.first = CacheSteps(model, caches)
        self._parked: dict[int, Caches] = {}

    def park(self, steps: CacheSteps, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        """As `Extender`."""
        for place, row, tokens in zip(places, rows, fed, strict=True):
            mine = [_row_of(cache, place) for cache in steps.caches]
            for cache in mine if step > tokens else ():
                cache.trim(step - tokens)
            self._parked[row] = mine
        mx.eval(
            [list(arrays_of(cache_rows.arrays(self._parked[row]))) for row in rows]
        )  # otherwise they would keep the batch's buffers

    def drop(self, row: int) -> None:
        """As `Extender`."""
        del self._parked[row]

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """As `Extender`."""
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


def _appended(own: Pair | None, new: Pair | None) -> Pair:
    assert new is not None
    if own is None:
        return new
    return mx.concatenate([own[0], new[0]], axis=2), mx.concatenate([own[1], new[1]], axis=2)


def _gathered(pair: Pair, index_bt: mx.array) -> Pair:
    """Keys and values at these places of each row."""
    rows = mx.arange(index_bt.shape[0])[:, None]

    def gathered(array_bktd: mx.array) -> mx.array:
        array_btkd = array_bktd.swapaxes(1, 2)
        return mx.contiguous(array_btkd[rows, index_bt].swapaxes(1, 2))

    return gathered(pair[0]), gathered(pair[1])


def _row_of(cache: Any, place: int) -> Any:
    """A plain cache of one row of a batch."""
    if hasattr(cache, "left_padding") and hasattr(cache, "extract"):  # rows of different lengths
        return cache.extract(place)
    index = mx.array([place], mx.int32)
    state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)
    return type(cache).from_state(state)
