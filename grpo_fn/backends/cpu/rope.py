"""Rotary position embeddings (arXiv 2104.09864) from tables of cosines and sines.

    a' = a cos θ − b sin θ,  b' = a sin θ + b cos θ      a, b: halves of a head;  θ = position · frequency

On a CPU MLX computes a cosine and a sine for each number of each layer, some 20 ns each: more than all else
that a rotation takes. Here a position is split, p = 1024 h + l, and

    cos θ_p = cos θ_1024h cos θ_l − sin θ_1024h sin θ_l
    sin θ_p = sin θ_1024h cos θ_l + cos θ_1024h sin θ_l

with rows of two tables. The tables are constants, so that a compiled step computes this once for all layers.
"""

import functools
import math
from typing import Any, cast

import mlx.core as mx

_LOW_BITS = 10  # of a position; the higher ones have a table of as many rows: 1 million positions
_ROWS = 1 << _LOW_BITS


def takes_heads(x: mx.array, dims: int, offset: Any) -> bool:
    """Whether `rope` is for these: float32 heads [B,H,L,D] all of which turns."""
    whole = x.ndim == 4 and x.shape[3] == dims and dims % 2 == 0
    known = isinstance(offset, int) or (isinstance(offset, mx.array) and offset.ndim <= 1)
    return x.dtype == mx.float32 and whole and known


def rope(x: mx.array, base: float, offset: int | mx.array) -> mx.array:
    """The heads [B,H,L,D] turned by their positions; differentiable; `takes_heads` must hold.

    Args:
        base: a position is divided by its powers 2j/D.
        offset: the position of each row's first token, one for all or [B]; positions below 2^20.
    """
    cosine, sine = _turns(offset, x.shape[2], x.shape[-1] // 2, base)
    return cast(mx.array, _turned(x, cosine, sine))


@mx.custom_function
def _turned(x: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    return x * cosine + _halves_swapped(x) * sine


@_turned.vjp
def _turned_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
    _, cosine, sine = primals  # turned back
    back = cotangent * cosine - _halves_swapped(cotangent) * sine
    return back, mx.zeros_like(cosine), mx.zeros_like(sine)


def _halves_swapped(x: mx.array) -> mx.array:
    half = x.shape[-1] // 2
    return mx.concatenate([x[..., half:], x[..., :half]], axis=-1)


def _turns(offset: int | mx.array, length: int, half: int, base: float) -> tuple[mx.array, mx.array]:
    """cos θ for both halves, and −sin θ, sin θ: [L,D], or [B,1,L,D]."""
    width = 2 * half
    if isinstance(offset, int) and offset + length <= _ROWS:
        turns = _table(1, half, base)[offset : offset + length]
        return turns[:, :width], turns[:, width:]
    position_bl = mx.array(offset).reshape(-1, 1) + mx.arange(length)
    high = _table(_ROWS, half, base)[position_bl >> _LOW_BITS]
    low = _table(1, half, base)[position_bl & (_ROWS - 1)]
    c_high, s_high, c_low, s_low = high[..., :half], high[..., -half:], low[..., :half], low[..., -half:]
    cosine, sine = c_high * c_low - s_high * s_low, s_high * c_low + c_high * s_low
    return (
        mx.concatenate([cosine, cosine], axis=-1)[:, None],
        mx.concatenate([-sine, sine], axis=-1)[:, None],
    )


@functools.lru_cache(maxsize=16)
def _table(step: int, half: int, base: float) -> mx.array:
    """cos θ, cos θ, −sin θ, sin θ at the positions 0, step, 2 step …: [rows, 2 D], from angles in float64."""
    rates = [base ** (-j / half) for j in range(half)]
    rows = []
    for position in range(0, _ROWS * step, step):
        angles = [position * rate for rate in rates]
        cosine, sine = [math.cos(angle) for angle in angles], [math.sin(angle) for angle in angles]
        rows.append([*cosine, *cosine, *(-value for value in sine), *sine])
    return mx.array(rows, mx.float32)
