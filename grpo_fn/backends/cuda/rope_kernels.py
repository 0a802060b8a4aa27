"""A CUDA kernel for rotary position embeddings (arXiv 2104.09864) of whole sequences, and their gradient.

    a' = a cos θ − b sin θ,  b' = a sin θ + b cos θ      a, b: halves of a head;  θ = position · frequency

The gradient rotates back by the same angle. A thread rotates sixteen bytes of each half; MLX's own kernel
rotates one number of each, and takes three times as long.
"""

import math
from typing import Any, cast

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel, literal, takes_dtype

_THREADS = 256

_SOURCE = """
    constexpr int N = 16 / sizeof(T), HALF = D / 2, EACH = HALF / N;  // threads a row
    struct alignas(16) Numbers { T at[N]; };
    const size_t thread = (size_t)blockIdx.x * THREADS + threadIdx.x, row = thread / EACH;
    const int length = x_shape[1], heads = x_shape[2], first = thread % EACH * N;
    if (row >= (size_t)x_shape[0] * length * heads) return;
    const float position = row / heads % length;
    const size_t at = row * D + first;
    Numbers low = *reinterpret_cast<const Numbers*>(x + at);
    Numbers high = *reinterpret_cast<const Numbers*>(x + at + HALF);
    for (int i = 0; i < N; i++) {
        const int j = first + i;
        float sine, cosine;
        sincosf(position * (FREQUENCY), &sine, &cosine);
        if (BACK) sine = -sine;
        const float a = low.at[i], b = high.at[i];
        low.at[i] = T(a * cosine - b * sine);
        high.at[i] = T(a * sine + b * cosine);
    }
    *reinterpret_cast<Numbers*>(out + at) = low;
    *reinterpret_cast<Numbers*>(out + at + HALF) = high;
"""


def takes_heads(x: mx.array, dims: int, offset: Any) -> bool:
    """Whether the kernel runs here on heads [B,H,L,D] that are rotated completely, from position 0."""
    whole = x.ndim == 4 and x.shape[2] > 1 and x.shape[3] == dims and x.size > 0
    return (
        takes_dtype(x.dtype)
        and whole
        and dims * x.dtype.size % 32 == 0
        and isinstance(offset, int)
        and offset == 0
    )


def _turned(x: mx.array, periods: mx.array | float, back: bool) -> mx.array:
    x = x.swapaxes(1, 2)  # as a projection leaves them
    given = isinstance(periods, mx.array)
    powers = "" if given else f"exp2f(-{literal(math.log2(cast(float, periods)))} * j / HALF)"
    kernel = cuda_kernel(
        "rope_given" if given else "rope",
        ("x", "periods")[: 1 + given],
        ("out",),
        _SOURCE.replace("FREQUENCY", powers or "1.0f / periods[j]"),
    )
    threads = x.size * x.dtype.size // 32
    (out,) = kernel(
        inputs=[x, periods] if given else [x],
        template=[("T", x.dtype), ("D", x.shape[-1]), ("BACK", back), ("THREADS", _THREADS)],
        grid=(-(-threads // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return out.swapaxes(1, 2)


def rope(x: mx.array, periods: mx.array | float, offset: int = 0) -> mx.array:
    """The rotated heads [B,H,L,D], starting at position 0; differentiable; `takes_heads(x)` must hold.

    Args:
        periods: divisors of the position, float32 [D/2]; or a base, for its powers 2j/D.
        offset: 0, as `takes_heads` requires.
    """

    @mx.custom_function
    def turned(x: mx.array) -> mx.array:
        return _turned(x, periods, back=False)

    @turned.vjp
    def turned_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return _turned(cotangent.astype(x.dtype), periods, back=True)

    return cast(mx.array, turned(x))
