"""Rotary position embeddings (arXiv 2104.09864) of one token a row as a product, on a CPU.

    x R,   R = [[cos θ, sin θ], [−sin θ, cos θ]],   θ = position · base^(−2j/D)

Three operations where MLX describes a dozen. R is the same for all heads of all layers: a compiled step makes
it once, and it pays in those alone.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cpu.elementwise import on_cpu
from grpo_fn.backends.mechanisms import DecodeForm
from grpo_fn.layers import is_one_token, replaced_layers


class Rotation(nn.RoPE):
    """Rotary embeddings that turn one token a row by the product, and everything else as MLX does."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if takes_token(x, self.dims, offset):
            return turned(x, offset, self.base)
        return super().__call__(x, offset)


@contextmanager
def rotations(module: nn.Module) -> Iterator[None]:
    """The module with `Rotation` in place of plain rotary embeddings, until the end of the `with` block."""
    plain = [
        (name, layer)
        for name, layer in module.named_modules()
        if type(layer) is nn.RoPE and not layer.traditional and layer.scale == 1
    ]
    mine = [(name, Rotation(layer.dims, base=layer.base)) for name, layer in plain]
    with replaced_layers(module, mine, plain):
        yield


def takes_token(x: mx.array, dims: int, offset: Any) -> bool:
    """Whether heads [B,H,1,D] turn this way: all of them, by a position that is an array, [] or [B]."""
    whole = x.ndim == 4 and x.shape[-1] == dims and is_one_token(x)
    return whole and on_cpu(x) and isinstance(offset, mx.array)


def turned(x: mx.array, position: mx.array, base: float) -> mx.array:
    """The heads [B,H,1,D], first half and second half a pair, turned by their position, [] or [B]."""
    frequency, straight, crossed = _parts(x.shape[-1], base)
    angle = position.astype(mx.float32)[..., None, None, None] * frequency
    # In arrays of their own: one kernel for all would take a sine of each of the matrix's numbers.
    cosine, sine = mx.contiguous(mx.cos(angle)), mx.contiguous(mx.sin(angle))
    matrix = straight * cosine + crossed * sine
    return x @ (matrix.squeeze() if position.ndim == 0 else matrix)


@functools.cache
def _parts(dims: int, base: float) -> tuple[mx.array, mx.array, mx.array]:
    """Frequencies [D] of the columns, places of the cosines and, with their sign, of the sines [D,D]."""
    half = dims // 2
    frequency = mx.exp(-mx.log(mx.array(base)) * mx.arange(half) / half)
    none, one = mx.zeros((half, half)), mx.eye(half)
    crossed = mx.concatenate([mx.concatenate([none, one], 1), mx.concatenate([-one, none], 1)], 0)
    parts = mx.concatenate([frequency, frequency]), mx.eye(dims), crossed
    mx.eval(parts)
    return parts


FORM = DecodeForm(rotations, lambda module, compute: [])  # matrices of one step: too small to count
