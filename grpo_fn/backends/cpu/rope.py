"""Rotary position embeddings (arXiv 2104.09864) from tables of cosines and sines.

    a' = a cos θ − b sin θ,  b' = a sin θ + b cos θ      a, b: halves of a head;  θ = position · frequency

On a CPU MLX computes a cosine and a sine for each number of each layer, some 20 ns each: more than all else
that a rotation takes. Here a position is split, p = 2048 h + l, and

    cos θ_p = cos θ_2048h cos θ_l − sin θ_2048h sin θ_l
    sin θ_p = sin θ_2048h cos θ_l + cos θ_2048h sin θ_l

with rows of two tables. The tables are constants, so that a compiled step computes this once for all layers.
"""

import functools
from typing import Any, cast

import mlx.core as mx
import numpy as np

_LOW_BITS = 11  # of a position; the higher ones have a table of as many rows: 4 million positions
_ROWS = 1 << _LOW_BITS


def takes_heads(x: mx.array, dims: int, offset: Any) -> bool:
    """Whether `rope` is for these: float32 heads [B,H,L,D] all of which turns."""
    whole = x.ndim == 4 and x.shape[3] == dims and dims % 2 == 0
    known = isinstance(offset, int) or (isinstance(offset, mx.array) and offset.ndim <= 1)
    return x.dtype == mx.float32 and whole and known


def rope(x: mx.array, periods: mx.array | float, offset: int | mx.array) -> mx.array:
    """The heads [B,H,L,D] turned by their positions; differentiable; where `takes_heads`.

    Args:
        periods: a base: a position is divided by its powers 2j/D. An array of periods is left to MLX.
        offset: the position of each row's first token, one for all or [B].
    """
    if isinstance(periods, mx.array):
        return mx.fast.rope(
            x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=offset, freqs=periods
        )
    cosine, sine = _turns(offset, x.shape[2], x.shape[-1] // 2, periods)
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
    """cos θ for both halves and −sin θ, sin θ: [L,D], or [B,1,L,D]."""
    if isinstance(offset, int):
        return _constants(offset, length, half, base)
    low, high = _table(1, half, base), _table(_ROWS, half, base)
    position_bl = offset.reshape(-1, 1) + _range(length)
    of_high, of_low = high[position_bl >> _LOW_BITS], low[position_bl & (_ROWS - 1)]  # [B,L,D]: cos, sin
    c_high, s_high = of_high[..., :half], of_high[..., half:]
    c_low, s_low = of_low[..., :half], of_low[..., half:]
    cosine, sine = c_high * c_low - s_high * s_low, s_high * c_low + c_high * s_low
    return (
        mx.concatenate([cosine, cosine], axis=-1)[:, None],
        mx.concatenate([-sine, sine], axis=-1)[:, None],
    )


def _angles(positions: np.ndarray, half: int, base: float) -> np.ndarray:
    return positions[:, None] * base ** (-np.arange(half) / half)


@functools.lru_cache(maxsize=64)
def _constants(first: int, length: int, half: int, base: float) -> tuple[mx.array, mx.array]:
    """As `_turns`, for positions that are known."""
    angles = _angles(np.arange(first, first + length, dtype=np.float64), half, base)
    cosine, sine = np.cos(angles), np.sin(angles)
    joined = np.concatenate([cosine, cosine], axis=1), np.concatenate([-sine, sine], axis=1)
    return mx.array(joined[0].astype(np.float32)), mx.array(joined[1].astype(np.float32))


@functools.lru_cache(maxsize=16)
def _table(step: int, half: int, base: float) -> mx.array:
    """cos and sin, side by side, of the positions 0, step, 2 step …: [rows, D]."""
    angles = _angles(step * np.arange(_ROWS, dtype=np.float64), half, base)
    return mx.array(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


@functools.lru_cache(maxsize=64)
def _range(length: int) -> mx.array:
    return mx.array(np.arange(length, dtype=np.int32))
