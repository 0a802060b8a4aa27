"""Rotary position embeddings (arXiv 2104.09864) whose gradient is a rotation of the same form.

    (a, b) → (a · cos θ + b · (−sin θ), b · cos θ + a · sin θ)        θ = position · frequency

for the halves a and b of a head. The gradient turns back, which exchanges sin θ and −sin θ. So a compiled
step has one form of program for all of it; mlx.fast.rope has a dozen, which g++ compiles before the first
update.
"""

import functools
import math
from typing import Any, cast

import mlx.core as mx

from grpo_fn.backends.decoding import are_shared
from grpo_fn.layers import is_one_token


def takes_heads(x: mx.array, dims: int, offset: Any) -> bool:
    """Whether `rope` supports this input: float32 [B,H,L,D], all D rotated.

    Heads of one token: where all layers take the same positions.
    """
    if x.dtype != mx.float32 or x.ndim != 4 or x.shape[3] != dims or dims % 2:
        return False
    if is_one_token(x):
        return isinstance(offset, int) or are_shared(offset)
    return isinstance(offset, int) or (isinstance(offset, mx.array) and offset.ndim <= 1)


def rope(x: mx.array, base: float, offset: int | mx.array) -> mx.array:
    """The heads [B,H,L,D], float32, turned by their positions.

    Args:
        x: `takes_heads` holds.
        base: a position is divided by its powers 2j/D.
        offset: the position of the first token, one for all rows or [B].
    """
    length, width = x.shape[2:]
    if length == 1:
        cosine, sine = _of_a_step(cast(Any, offset), width, base)  # an array is its own key
        return x * cosine + (x @ _exchange(width)) * sine
    positions = _positions(length)
    if not isinstance(offset, int) or offset:
        positions = positions + mx.array(offset, mx.float32).reshape(-1, 1, 1)
    # [L,D/2], or [B,1,L,D/2]; −θ by a product too, as a negation and a sine would be another program
    ahead, back = (positions[..., None] @ rates for rates in _frequencies(width // 2, base))
    return cast(mx.array, _turned(x, mx.cos(ahead), mx.sin(ahead), mx.sin(back)))


# Constants, kept: MLX merges equal operations of a compiled step only if they have a common input, so that
# with an mx.arange in each call every layer would compute its own sines.
@functools.lru_cache(maxsize=256)
def _positions(length: int) -> mx.array:
    """0, 1, … in float32."""
    return mx.array(list(range(length)), mx.float32)


@functools.lru_cache(maxsize=16)
def _frequencies(half: int, base: float) -> tuple[mx.array, mx.array]:
    """The frequencies [1,D/2], and their negatives."""
    rates = [base ** (-j / half) for j in range(half)]
    return mx.array([rates], mx.float32), mx.array([[-rate for rate in rates]], mx.float32)


# MLX's form of a decoding step computes powers, cosines and sines again for each layer's queries and keys.
@functools.lru_cache(maxsize=4)
def _of_a_step(offset: int | mx.array, width: int, base: float) -> tuple[mx.array, mx.array]:
    """cos θ of both halves of a head, and −sin θ of the first with sin θ of the second: [D] or [B,1,1,D]."""
    half = width // 2
    if isinstance(offset, int):  # kept for other threads too, which cannot compute this one's arrays
        angles = [offset * base ** (-j / half) for j in range(half)]
        sines = [math.sin(angle) for angle in angles]
        return mx.array([math.cos(angle) for angle in angles] * 2), mx.array([-s for s in sines] + sines)
    angle = offset.astype(mx.float32).reshape(-1, 1, 1, 1) * _frequencies(half, base)[0]
    cosine, sine = mx.cos(angle), mx.sin(angle)
    return mx.concatenate([cosine, cosine], axis=-1), mx.concatenate([-sine, sine], axis=-1)


@functools.lru_cache(maxsize=4)
def _exchange(width: int) -> mx.array:
    """The matrix [D,D] whose product exchanges the halves of a head: one operation."""
    return mx.array([[float(abs(i - j) == width // 2) for j in range(width)] for i in range(width)])


@mx.custom_function
def _turned(x: mx.array, cosine: mx.array, sine: mx.array, negative: mx.array) -> mx.array:
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([_mixed(a, b, cosine, negative), _mixed(b, a, cosine, sine)], axis=-1)


@_turned.vjp
def _turned_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
    _, cosine, *sines = primals
    back = cast(mx.array, _turned(cotangent, cosine, *reversed(sines)))
    return back, *(mx.zeros_like(each) for each in primals[1:])


def _mixed(a: mx.array, b: mx.array, of_a: mx.array, of_b: mx.array) -> mx.array:
    return a * of_a + b * of_b
