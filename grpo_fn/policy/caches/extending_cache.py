"""Extending rows by several tokens at once: over one copy of each prompt and the rows' own tokens so far.

    attention of a new token = softmax over [its prompt | its row's own tokens | the new ones up to itself]

Rows get different numbers of tokens: they are padded on the right, where no token attends to the padding.
"""

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import CANNOT_CALL
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.caches.prefix_cache import Layout, Pair, attend_over_prompts


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
            raise ValueError(f"window_size = {window_size}: expected no window")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Take the new keys and values [B,K,E,D]."""
        self.new = keys, values
        return keys, values

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Attention [B,H,E,D] of the new tokens."""
        length, repeats = queries.shape[2], queries.shape[1] // keys.shape[1]
        own = [] if self._own is None else [(*self._own, self._layout.suffix_seen)]
        causal = mx.tile(mx.tri(length, dtype=mx.bool_), (repeats, 1))
        parts = [*own, (keys, values, causal)]
        return attend_over_prompts(queries, self._prompt, self._layout, parts, scale)


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
