"""Decoding G completions of a prompt over one copy of the prompt's keys and values.

    attention of a row = softmax over [its prompt's keys | its own keys]

The prompt's part is a product of all its rows' queries with one matrix. With copied prompts it would be a
product with a separate matrix for each row. So it needs G times less memory to hold and to read (Hydragen,
arXiv 2402.05099, sec. 3). Prompts of different lengths need no padding in the rows' own part.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, find, number
from grpo_fn.backends.composed import softmax
from grpo_fn.backends.decoding import OneTokenCache, shared_positions
from grpo_fn.layers import CANNOT_CALL
from grpo_fn.policy.caches.kv_caches import Caches, plain_caches, shares_keys
from grpo_fn.policy.layers.patched_layers import attends_through_cache

Pair = tuple[mx.array, mx.array]  # keys and values

ROOM = 64  # tokens by which the rows' own part grows


@attrs.frozen(eq=False)
class Layout:
    """Which rows continue which prompt; the same for all layers."""

    prompt_of: tuple[int, ...]  # B: each row's prompt; the rows of a prompt are neighbours
    lengths: tuple[int, ...]  # P: tokens of each prompt
    grid_n: mx.array | None  # row at each place of a P × largest group grid, flat; None: the rows fill it
    place_b: mx.array | None  # place of each row in that grid
    seen_p11l: mx.array | None  # the valid positions of each prompt; None: all of one length
    start: int | mx.array  # position of each row's first own place
    suffix_seen: mx.array | None = (
        None  # bool [B,1,1,T]: which of the first T own places a row has; None: all
    )
    later_turn: bool = False  # whether own places do not start right after the prompts
    shifts: tuple[int, ...] | None = None  # P: added to positions after a prompt; None: nothing

    @classmethod
    def of(cls, prompt_of: list[int], lengths: list[int], shifts: Sequence[int] | None = None) -> "Layout":
        """The layout of rows that are sorted by prompt; each prompt has a row."""
        groups = [prompt_of.count(p) for p in range(len(lengths))]
        widest = max(groups)
        grid = place = None
        if min(groups) < widest:
            first = [sum(groups[:p]) for p in range(len(groups))]
            cells = [first[p] + min(i, groups[p] - 1) for p in range(len(groups)) for i in range(widest)]
            places = [p * widest + i for p, count in enumerate(groups) for i in range(count)]
            grid, place = mx.array(cells, mx.int32), mx.array(places, mx.int32)
        seen, start = None, lengths[0]
        if min(lengths) < max(lengths):
            seen = (mx.arange(max(lengths))[None] < mx.array(lengths)[:, None])[:, None, None]
            start = mx.array([lengths[p] for p in prompt_of], mx.int32)
        if shifts is None:
            return cls(tuple(prompt_of), tuple(lengths), grid, place, seen, start)
        start = mx.array([lengths[p] + shifts[p] for p in prompt_of], mx.int32)
        return cls(tuple(prompt_of), tuple(lengths), grid, place, seen, start, shifts=tuple(shifts))

    def by_prompt(self, row_bx: mx.array) -> mx.array:
        """[B,...] to [P,G,...]: each prompt's rows; in smaller groups the last row is repeated."""
        if self.grid_n is not None:
            row_bx = row_bx[self.grid_n]
        return row_bx.reshape(len(self.lengths), -1, *row_bx.shape[1:])

    def by_row(self, grid_pgx: mx.array) -> mx.array:
        """The inverse: [P,G,...] to [B,...]."""
        flat = grid_pgx.reshape(-1, *grid_pgx.shape[2:])
        return flat if self.place_b is None else flat[self.place_b]


class PrefixCache(OneTokenCache):
    """One layer's cache: prompts once, rows' own tokens by row."""

    def __init__(
        self,
        keys_phld: mx.array,
        values_phld: mx.array,
        layout: Layout,
        own: tuple[mx.array, mx.array] | None = None,
    ) -> None:
        """`own`: the rows' own keys and values so far, [B,K,T,D]; None: none."""
        from mlx_lm.models.cache import KVCache

        self._prompt = keys_phld, values_phld
        self._layout = layout
        self._own: Any = KVCache()
        self._own.step = ROOM
        if own is not None:
            self._own.keys, self._own.values = own
            self._own.offset = own[0].shape[2]
        self.attended = False  # whether it was ever asked to attend

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: of all rows, or [B]."""
        start, own = self._layout.start, self._own.offset
        return start + own if isinstance(start, int) else shared_positions(start, own)

    @property
    def state(self) -> list[mx.array]:
        """Everything it holds, to be evaluated."""
        return [a for a in (*self._prompt, self._own.keys, self._own.values) if a is not None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token to each row's own part, and return that part."""
        return self._own.update_and_fetch(keys, values)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Attention [B,H,1,D] of one token a row over its prompt and its own tokens."""
        self.attended = True
        seen = self._layout.suffix_seen
        if seen is not None:  # all later places are valid
            behind = keys.shape[2] - seen.shape[-1]
            seen = mx.pad(seen, [(0, 0)] * 3 + [(0, behind)], constant_values=mx.array(True))
        return attend_over_prompts(queries, self._prompt, self._layout, [(keys, values, seen)], scale)

    @property
    def prompt(self) -> tuple[mx.array, mx.array]:
        """The prompts' keys and values [P,K,L,D]."""
        return self._prompt

    @property
    def own(self) -> tuple[mx.array, mx.array]:
        """The rows' own keys and values [B,K,T,D], if there are any."""
        return self._own.keys_and_values()

    def keep(self, rows: mx.array, prompts: mx.array | None, layout: Layout) -> None:
        """Keep these rows, and the prompts that still have a row (None: all)."""
        self._layout = layout
        if prompts is not None:
            keys, values = self._prompt
            longest = max(layout.lengths)
            self._prompt = keys[prompts, :, :longest], values[prompts, :, :longest]
        if self._own.keys is not None:
            own_keys, own_values = self._own.keys_and_values()
            self._own.keys, self._own.values = own_keys[rows], own_values[rows]


def attend_over_prompts(
    queries: mx.array,
    prompt: Pair,
    layout: Layout,
    own: Sequence[tuple[mx.array, mx.array, mx.array | None]],
    scale: float,
) -> mx.array:
    """Attention [B,H,E,D] of E tokens a row over its prompt and its own tokens.

    Args:
        queries: [B,H,E,D].
        prompt: keys and values [P,K,L,D], one copy of each prompt.
        layout: which rows continue which prompt.
        own: parts of the rows' own tokens: keys and values [B,K,T,D], and which of them a query sees, of a
            shape that broadcasts to [B,K,R·E,T], R = H / K; None: all.
        scale: of the scores.
    """
    rows, heads, length, width = queries.shape
    prompt_keys, prompt_values = prompt
    prompts, shared, places, _ = prompt_keys.shape
    # Heads that share keys are further rows of one product.
    q_bknd = (queries * scale).reshape(rows, shared, heads // shared * length, width)
    q_pgknd = layout.by_prompt(q_bknd)
    grid = (prompts, shared, q_pgknd.shape[1], q_bknd.shape[2])
    q_pkmd = q_pgknd.transpose(0, 2, 1, 3, 4).reshape(prompts, shared, -1, width)
    scores_pkml = _only(q_pkmd @ prompt_keys.swapaxes(-1, -2), layout.seen_p11l)
    scores = [layout.by_row(scores_pkml.reshape(*grid, places).transpose(0, 2, 1, 3, 4))]
    scores += [_only(q_bknd @ keys.swapaxes(-1, -2), seen) for keys, _, seen in own]
    weights = softmax(mx.concatenate(scores, axis=-1))

    w_pkml = layout.by_prompt(weights[..., :places]).transpose(0, 2, 1, 3, 4)
    from_prompt = _mixed(w_pkml.reshape(prompts, shared, -1, places), prompt_values)
    out = layout.by_row(from_prompt.reshape(*grid, -1).transpose(0, 2, 1, 3, 4))
    for keys, values, _ in own:
        end = places + keys.shape[2]
        out, places = out + _mixed(weights[..., places:end], values), end
    return out.astype(queries.dtype).reshape(rows, heads, length, out.shape[-1])


def _only(scores: mx.array, seen: mx.array | None) -> mx.array:
    """The scores of what is seen; None: of all."""
    return scores if seen is None else mx.where(seen, scores, mx.finfo(scores.dtype).min)


def sharing_pays() -> bool:
    """Whether one copy of each prompt was measured as faster on this kind of device: `generate`'s default."""
    return enabled("shared_prefix") and bool(number("shares_prompts"))


def shares_prefix(module: nn.Module) -> bool:
    """Whether a model can decode over `PrefixCache`: plain keys and values, and `attention`, in every layer.

    This is found by building a call without computing it. Each cache has to be asked to attend: a layer that
    takes the keys and attends by itself (phi3small) would not see the prompt.
    """
    from mlx_lm.models.cache import KVCache

    if not attends_through_cache(module) or shares_keys(module):
        return False
    caches = plain_caches(module)
    if not all(type(cache) is KVCache for cache in caches):
        return False
    try:
        module(mx.zeros((2, 3), mx.int32), cache=caches)
        forked = fork(caches, [3, 2], 5)
        module(mx.zeros((10, 1), mx.int32), cache=forked)
    except CANNOT_CALL:
        return False
    return all(cache.attended for cache in forked)


def fork(
    caches: Caches, lengths: list[int], group_size: int, shifts: Sequence[int] | None = None
) -> list[PrefixCache]:
    """Plain caches after P prompts, padded on the right, as caches of P · G rows.

    `shifts` is added to the positions after each prompt: see `PromptImages.shift`.
    """
    layout = Layout.of([p for p in range(len(lengths)) for _ in range(group_size)], lengths, shifts)
    longest = max(lengths)
    forked = []
    for cache in caches:
        keys, values = cache.keys_and_values()
        # A copy without the buffer's spare room.
        cut = mx.contiguous(keys[:, :, :longest]), mx.contiguous(values[:, :, :longest])
        forked.append(PrefixCache(*cut, layout))
    return forked


def keep_prefix_rows(caches: list[PrefixCache], rows: list[int]) -> None:
    """Keep the given rows, in rising order, and drop the prompts that no row continues any more."""
    old = caches[0]._layout
    prompt_of = [old.prompt_of[row] for row in rows]
    live = sorted(set(prompt_of))
    number = {p: i for i, p in enumerate(live)}
    shifts = None if old.shifts is None else [old.shifts[p] for p in live]
    layout = Layout.of([number[p] for p in prompt_of], [old.lengths[p] for p in live], shifts)
    prompts = None if len(live) == len(old.lengths) else mx.array(live, mx.int32)
    index = mx.array(rows, mx.int32)
    if old.later_turn:
        start = old.start[index] if isinstance(old.start, mx.array) else old.start
        seen = None if old.suffix_seen is None else old.suffix_seen[index]
        layout = attrs.evolve(layout, start=start, suffix_seen=seen, later_turn=True)
    for cache in caches:
        cache.keep(index, prompts, layout)


def _mixed(weights: mx.array, values: mx.array) -> mx.array:
    fast = find("weighted_values", weights, values)
    return weights @ values if fast is None else fast(weights, values)
