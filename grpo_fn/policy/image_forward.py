"""Forward passes with images: features replace embeddings, and rotations use three positions per
token.

Positions are passed through the caches, because a layer rotates by its cache's `offset`. For text,
the offset is a number, or one number per row; here, it is a `Positions`.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.images import ImageRows
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.trees import group_numbers


@attrs.frozen(eq=False)
class Positions:
    """Time, row and column of each token, instead of an offset."""

    positions_b3l: mx.array  # int32


def use_multimodal_rope(module: nn.Module, sections: Sequence[int]) -> None:
    """Makes this model's layers rotate by `Positions` if a cache contains them; text is rotated as
    before.

    Call it before `Policy.from_module`.

    Args:
        module: a model whose layers have a plain `mlx.nn.RoPE` as `self_attn.rope`.
        sections: the numbers of frequencies that depend on the time, the row and the column,
            starting with the highest frequency.

    Raises:
        ValueError: the sections do not add up to a head's frequencies, or a layer rotates in a
            different way.
    """
    for layer in cast("list[nn.Module]", module.layers):
        rope = getattr(getattr(layer, "self_attn", None), "rope", None)
        if not isinstance(rope, nn.RoPE) or rope.traditional or rope.scale != 1:
            raise ValueError(
                f"its layers rotate by {type(rope).__name__}: expected a plain mlx.nn.RoPE"
            )
        if len(sections) != 3 or 2 * sum(sections) != rope.dims:
            raise ValueError(
                f"mrope_section is {list(sections)}: expected three numbers that add up to "
                f"{rope.dims // 2}, half a head's width"
            )
        rope.__class__ = _multimodal(tuple(sections))  # type: ignore[assignment]


def takes_images(module: nn.Module) -> bool:
    """Returns whether `use_multimodal_rope` was called for this module."""
    return any(hasattr(type(part), "sections") for part in module.modules())


@functools.cache
def _multimodal(sections: tuple[int, ...]) -> type[nn.Module]:
    axis_f = group_numbers(sections)

    class MultimodalRoPE(nn.RoPE):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            if not isinstance(offset, Positions):
                return super().__call__(x, offset)
            half = self.dims // 2
            rate_f = mx.power(self.base, -mx.arange(half, dtype=mx.float32) / half)
            position_bfl = offset.positions_b3l[:, mx.array(axis_f)]
            angle_b1lf = (position_bfl.swapaxes(1, 2) * rate_f)[:, None]
            cos, sin = mx.cos(angle_b1lf), mx.sin(angle_b1lf)
            one, other = x[..., :half].astype(mx.float32), x[..., half:].astype(mx.float32)
            parts = [one * cos - other * sin, other * cos + one * sin]
            return mx.concatenate(parts, axis=-1).astype(x.dtype)

    MultimodalRoPE.sections = sections  # type: ignore[attr-defined]
    return MultimodalRoPE


def forward_with_images(
    backbone: Any, tokens_bl: mx.array, rows: ImageRows, caches: Caches
) -> mx.array:
    """Computes hidden states [B,L,D] for rows in which features replace the image tokens.

    The offsets of `caches` are the rows' positions.
    """
    embedded_bld = backbone.embed_tokens(tokens_bl)
    feature_bl = rows.feature_rl
    features_bld = rows.features_nd[mx.maximum(feature_bl, 0)].astype(embedded_bld.dtype)
    mixed_bld = mx.where(feature_bl[..., None] >= 0, features_bld, embedded_bld)
    return backbone(tokens_bl, cache=caches, input_embeddings=mixed_bld)


class WholeRows:
    """Replaces a layer's cache if whole rows are computed at once."""

    keeps_nothing = True  # so that checkpointed blocks may call it again

    def __init__(self, positions_b3l: mx.array) -> None:
        self.offset = Positions(positions_b3l)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns all keys and values unchanged."""
        return keys, values

    def make_mask(self, length: int, **kwargs: Any) -> str | None:
        """Returns a mask with which each token attends to itself and the tokens before it."""
        return "causal" if length > 1 else None


class PositionedCache:
    """A layer's plain cache, with three positions for each token of the next call."""

    def __init__(self, cache: Any, positions_b3l: mx.array) -> None:
        self._cache = cache
        self.offset = Positions(positions_b3l)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
