"""Decodes G completions of a prompt with one copy of the prompt's keys and values.

    attention of a row = softmax over [its prompt's keys | its own keys]

The prompt's part is a product of all its rows' queries with a single matrix, instead of one matrix
per row with copied prompts. Attention therefore needs and reads G times less memory (Hydragen,
arXiv 2402.05099, sec. 3). Prompts of different lengths need no padding in the rows' own part.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, find, number
from grpo_fn.backends.composed import softmax
from grpo_fn.layers import CANNOT_CALL
from grpo_fn.policy.caches.kv_caches import Caches, plain_caches, shares_keys
from grpo_fn.policy.layers.patched_layers import attends_through_cache
from grpo_fn.trees import group_numbers

Pair = tuple[mx.array, mx.array]  # keys and values

ROOM = 64  # number of tokens by which the rows' own part grows


@attrs.frozen(eq=False)
class Layout:
    """The assignment of rows to prompts, which is the same for all layers."""

    prompt_of: tuple[int, ...]  # B: each row's prompt; rows of the same prompt are adjacent
    lengths: tuple[int, ...]  # P: tokens of each prompt
    # row at each place in a flat grid of P × largest group; None means that the rows fill the grid
    grid_n: mx.array | None
    place_b: mx.array | None  # place of each row in that grid
    seen_p11l: mx.array | None  # each prompt's valid positions; None: equal lengths
    starts: tuple[int, ...]  # B: position of the first own column in each row
    start: int | mx.array  # the same: one number for all rows, or [B]
    firsts: tuple[int, ...]  # B: each row's first own column; earlier ones are padding
    first_b111: mx.array | None  # the same; None: no row has padding

    @classmethod
    def of(
        cls, prompt_of: list[int], lengths: list[int], starts: list[int], firsts: list[int]
    ) -> "Layout":
        """Creates a layout for rows that are sorted by prompt; each prompt has at least one row."""
        groups = [prompt_of.count(p) for p in range(len(lengths))]
        widest = max(groups)
        grid = place = None
        if min(groups) < widest:
            cells: list[int] = []
            places: list[int] = []
            for p, count in enumerate(groups):
                cells += [sum(groups[:p]) + min(i, count - 1) for i in range(widest)]
                places += range(p * widest, p * widest + count)
            grid = mx.array(cells, mx.int32)
            place = mx.array(places, mx.int32)
        seen = None
        if min(lengths) < max(lengths):
            seen = (mx.arange(max(lengths))[None] < mx.array(lengths)[:, None])[:, None, None]
        return cls(
            prompt_of=tuple(prompt_of),
            lengths=tuple(lengths),
            grid_n=grid,
            place_b=place,
            seen_p11l=seen,
            starts=tuple(starts),
            start=starts[0] if len(set(starts)) == 1 else mx.array(starts, mx.int32),
            firsts=tuple(firsts),
            first_b111=mx.array(firsts, mx.int32).reshape(-1, 1, 1, 1) if max(firsts) else None,
        )

    def by_prompt(self, row_bx: mx.array) -> mx.array:
        """Converts [B,...] to [P,G,...], grouped by prompt; smaller groups repeat their last row."""
        if self.grid_n is not None:
            row_bx = row_bx[self.grid_n]
        return row_bx.reshape(len(self.lengths), -1, *row_bx.shape[1:])

    def by_row(self, grid_pgx: mx.array) -> mx.array:
        """Converts [P,G,...] to [B,...]; the inverse of `by_prompt`."""
        flat = grid_pgx.reshape(-1, *grid_pgx.shape[2:])
        return flat if self.place_b is None else flat[self.place_b]


class PrefixCache:
    """One layer's cache: one copy of each prompt, and each row's own tokens."""

    def __init__(self, prompt: Pair, layout: Layout) -> None:
        """Creates a cache whose `prompt` contains keys and values, [P,K,L,D] each."""
        from mlx_lm.models.cache import KVCache

        self.prompt, self.layout = prompt, layout
        self.own: Any = KVCache()  # of the rows
        self.own.step = ROOM
        prompt_of_b = mx.array(layout.prompt_of, mx.int32)
        self.own.keys, self.own.values = (array[prompt_of_b, :, :0] for array in prompt)
        self.attended = False  # whether `attend` was ever called

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: one number for all rows, or [B]."""
        return self.layout.start + self.own.offset

    @property
    def state(self) -> list[mx.array]:
        """All arrays of the cache, for evaluation."""
        return [*self.prompt, self.own.keys, self.own.values]

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Returns None: a new token attends to all earlier tokens, so it needs no mask."""
        if length != 1 or window_size is not None:
            raise ValueError(
                f"length = {length}, window_size = {window_size}: expected 1 and no window"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Appends tokens to each row's own part, and returns that part."""
        return self.own.update_and_fetch(keys, values)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Computes attention [B,H,1,D] from each row's newest token to its prompt and its own
        tokens.
        """
        self.attended = True
        rows, heads, _, width = queries.shape
        layout, (prompt_keys, prompt_values) = self.layout, self.prompt
        prompts, shared, columns, _ = prompt_keys.shape
        # Heads that share keys are additional rows of one product.
        q_bknd = (queries * scale).reshape(rows, shared, heads // shared, width)
        q_pgknd = layout.by_prompt(q_bknd)
        grid = (prompts, shared, q_pgknd.shape[1], q_bknd.shape[2])
        q_pkmd = q_pgknd.transpose(0, 2, 1, 3, 4).reshape(prompts, shared, -1, width)
        scores_pkml = q_pkmd @ prompt_keys.swapaxes(-1, -2)
        if layout.seen_p11l is not None:
            scores_pkml = mx.where(layout.seen_p11l, scores_pkml, mx.finfo(scores_pkml.dtype).min)
        scores = layout.by_row(scores_pkml.reshape(*grid, columns).transpose(0, 2, 1, 3, 4))
        own_scores = q_bknd @ keys.swapaxes(-1, -2)
        if layout.first_b111 is not None:
            own = mx.arange(own_scores.shape[-1]) >= layout.first_b111
            own_scores = mx.where(own, own_scores, mx.finfo(own_scores.dtype).min)
        weights = softmax(mx.concatenate([scores, own_scores], axis=-1))

        w_pkml = layout.by_prompt(weights[..., :columns]).transpose(0, 2, 1, 3, 4)
        from_prompt = _mixed(w_pkml.reshape(prompts, shared, -1, columns), prompt_values)
        out = layout.by_row(from_prompt.reshape(*grid, -1).transpose(0, 2, 1, 3, 4))
        out = out + _mixed(weights[..., columns:], values)
        return out.astype(queries.dtype).reshape(rows, heads, 1, out.shape[-1])

    def join(self, other: "PrefixCache", layout: Layout) -> None:
        """Appends the prompts and rows of another cache; these rows have not sampled any tokens
        yet."""
        self.prompt = (
            _stacked(self.prompt[0], other.prompt[0]),
            _stacked(self.prompt[1], other.prompt[1]),
        )
        more = len(other.layout.prompt_of)
        self.own.keys, self.own.values = (
            mx.concatenate([own, mx.zeros((more, *own.shape[1:]), own.dtype)])
            for own in self.own.keys_and_values()
        )
        self.layout = layout

    def keep(self, rows: mx.array, prompts: mx.array | None, layout: Layout, spare: int) -> None:
        """Keeps these rows, and the prompts that still have rows (None means all).

        The first `spare` columns of the own parts are removed, because no row uses them.
        """
        self.layout = layout
        if prompts is not None:
            keys, values = self.prompt
            longest = max(layout.lengths)
            self.prompt = keys[prompts, :, :longest], values[prompts, :, :longest]
        own_keys, own_values = self.own.keys_and_values()
        self.own.keys, self.own.values = (
            own_keys[:, :, spare:][rows],
            own_values[:, :, spare:][rows],
        )
        self.own.offset -= spare


def sharing_pays() -> bool:
    """Returns whether sharing one copy of each prompt was measured to be faster on this kind of
    device; this is the default for `generate`.
    """
    return enabled("shared_prefix") and bool(number("shares_prompts"))


def shares_prefix(module: nn.Module) -> bool:
    """Returns whether a model can decode over `PrefixCache`. Every layer must have plain keys and
    values and call `attention`.

    The function builds a call without evaluating it. Every layer must let its cache compute
    attention: a layer that reads the keys and computes attention itself (phi3small) would miss the
    prompt.
    """
    from mlx_lm.models.cache import KVCache

    if not attends_through_cache(module) or shares_keys(module):
        return False
    caches = plain_caches(module)
    if not all(type(cache) is KVCache for cache in caches):
        return False
    try:
        module(mx.zeros((2, 3), mx.int32), cache=caches)
        forked = fork(caches, [3, 2], [5, 5])
        module(mx.zeros((10, 1), mx.int32), cache=forked)
    except CANNOT_CALL:
        return False
    return all(cache.attended for cache in forked)


def fork(
    caches: Caches, lengths: list[int], groups: Sequence[int], shifts: Sequence[int] | None = None
) -> list[PrefixCache]:
    """Converts plain caches for P prompts, padded on the right, to caches for the prompts' rows;
    `groups` contains the number of rows per prompt.

    `shifts` is added to the positions after each prompt: see `PromptImages.shift`.
    """
    prompt_of = group_numbers(groups)
    starts = [lengths[p] + (shifts[p] if shifts else 0) for p in prompt_of]
    layout = Layout.of(prompt_of, lengths, starts, [0] * len(prompt_of))
    longest = max(lengths)
    forked = []
    for cache in caches:
        keys, values = cache.keys_and_values()
        # Copies without the buffer's unused part.
        cut = mx.contiguous(keys[:, :, :longest]), mx.contiguous(values[:, :, :longest])
        forked.append(PrefixCache(cut, layout))
    return forked


def keep_prefix_rows(caches: list[PrefixCache], rows: list[int]) -> None:
    """Keeps the given rows, in ascending order, and drops the prompts without rows."""
    old = caches[0].layout
    prompt_of = [old.prompt_of[row] for row in rows]
    live = sorted(set(prompt_of))
    number = {p: i for i, p in enumerate(live)}
    index = mx.array(rows, mx.int32)
    spare = min(old.firsts[row] for row in rows)
    layout = Layout.of(
        [number[p] for p in prompt_of],
        [old.lengths[p] for p in live],
        [old.starts[row] + spare for row in rows],
        [old.firsts[row] - spare for row in rows],
    )
    prompts = None if len(live) == len(old.lengths) else mx.array(live, mx.int32)
    for cache in caches:
        cache.keep(index, prompts, layout, spare)


def join_prefix_rows(caches: list[PrefixCache], others: list[PrefixCache]) -> None:
    """Appends the prompts and rows of other caches that have just been forked; their own tokens
    start in the next column."""
    layout, new = caches[0].layout, others[0].layout
    column = caches[0].own.offset
    joined = Layout.of(
        [*layout.prompt_of, *(len(layout.lengths) + p for p in new.prompt_of)],
        [*layout.lengths, *new.lengths],
        [*layout.starts, *(start - column for start in new.starts)],
        [*layout.firsts, *(column for _ in new.firsts)],
    )
    for cache, other in zip(caches, others, strict=True):
        cache.join(other, joined)


def _stacked(one: mx.array, other: mx.array) -> mx.array:
    """Concatenates two arrays [P,K,L,D]; the shorter L is padded with zeros."""
    longest = max(one.shape[2], other.shape[2])
    widths = [(0, 0), (0, 0), (0, longest), (0, 0)]
    return mx.concatenate([mx.pad(each, widths)[:, :, :longest] for each in (one, other)])


def _mixed(weights: mx.array, values: mx.array) -> mx.array:
    fast = find("weighted_values", weights, values)
    return weights @ values if fast is None else fast(weights, values)
