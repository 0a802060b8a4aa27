"""Extending rows by several tokens at once: over one copy of each prompt and the rows' own tokens so far.

    attention of a new token = softmax over [its prompt | its row's own tokens | the new ones up to itself]

Rows get different numbers of tokens: they are padded on the right, where no token attends to the padding.
"""

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.composed import softmax
from grpo_fn.layers import CANNOT_CALL
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.caches.prefix_cache import Layout

Pair = tuple[mx.array, mx.array]  # keys and values


class ExtendingCache:
    """One layer's cache for one call with new tokens [B,E]; afterwards `new` holds their keys and values."""

    def __init__(self, prompt: Pair, own: Pair | None, layout: Layout) -> None:
        """`own` is [B,K,T,D] with the mask `layout.suffix_seen`; None: no row has own tokens."""
        self._prompt, self._own, self._layout = prompt, own, layout
        self.new: Pair | None = None

    @property
    def offset(self) -> int | mx.array:
        """Position of each row's first new token."""
        return self._layout.start

    @property
    def state(self) -> list[mx.array]:
        """Everything it holds, to be evaluated."""
        return [*self._prompt, *(self._own or ()), *(self.new or ())]

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: `attend` has its own."""
        if window_size is not None:
            raise ValueError(f"window_size = {window_size}: wanted no window")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Take the new keys and values [B,K,E,D]."""
        self.new = keys, values
        return keys, values

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Attention [B,H,E,D] of the new tokens."""
        layout = self._layout
        rows, heads, length, width = queries.shape
        shared, repeats = keys.shape[1], heads // keys.shape[1]
        prompt_keys, prompt_values = self._prompt
        prompts = prompt_keys.shape[0]
        least = mx.finfo(queries.dtype).min
        # [B,K,R·E,D]: heads that share keys are further rows of one product.
        q_bknd = (queries * scale).reshape(rows, shared, repeats * length, width)
        q_pgknd = layout.by_prompt(q_bknd)
        grid = q_pgknd.shape[:2]
        q_pkmd = q_pgknd.transpose(0, 2, 1, 3, 4).reshape(prompts, shared, -1, width)
        scores_pkml = q_pkmd @ prompt_keys.swapaxes(-1, -2)
        if layout.seen_p11l is not None:
            scores_pkml = mx.where(layout.seen_p11l, scores_pkml, least)
        in_grid = (prompts, shared, grid[1], repeats * length, prompt_keys.shape[2])
        parts = [layout.by_row(scores_pkml.reshape(in_grid).transpose(0, 2, 1, 3, 4))]
        if self._own is not None:
            scores_bknt = q_bknd @ self._own[0].swapaxes(-1, -2)
            if layout.suffix_seen is not None:
                scores_bknt = mx.where(layout.suffix_seen, scores_bknt, least)
            parts.append(scores_bknt)
        new_bknt = (q_bknd @ keys.swapaxes(-1, -2)).reshape(rows, shared, repeats, length, length)
        new_bknt = mx.where(mx.tri(length, dtype=mx.bool_), new_bknt, least)
        parts.append(new_bknt.reshape(rows, shared, repeats * length, length))

        weights = softmax(mx.concatenate(parts, axis=-1))
        place = prompt_keys.shape[2]
        w_pkml = layout.by_prompt(weights[..., :place]).transpose(0, 2, 1, 3, 4)
        of_prompt = w_pkml.reshape(prompts, shared, -1, place) @ prompt_values
        of_prompt = of_prompt.reshape(prompts, shared, grid[1], repeats * length, -1).transpose(0, 2, 1, 3, 4)
        out = layout.by_row(of_prompt)
        if self._own is not None:
            end = place + self._own[0].shape[2]
            out = out + weights[..., place:end] @ self._own[1]
            place = end
        out = out + weights[..., place:] @ values
        return out.astype(queries.dtype).reshape(rows, heads, length, out.shape[-1])


def extends_prefix(module: nn.Module) -> bool:
    """Whether a model that shares prefixes also takes several tokens a row over them.

    This is found by building a call without computing it.
    """
    caches = plain_caches(module)
    try:
        module(mx.zeros((2, 3), mx.int32), cache=caches)
        layout = Layout.of([0, 0, 1, 1], [3, 2])
        pairs = [(cache.keys[:, :, :3], cache.values[:, :, :3]) for cache in caches]
        module(mx.zeros((4, 2), mx.int32), cache=[ExtendingCache(pair, None, layout) for pair in pairs])
    except CANNOT_CALL:
        return False
    return True
