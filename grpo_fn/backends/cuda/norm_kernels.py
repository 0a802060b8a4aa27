"""CUDA kernels for x / rms(x) without a weight, and for its gradient: a warp reads a row once.

    n = x / sqrt(mean x² + ε)          ∂: (g − n · mean(g n)) / sqrt(mean x² + ε)

MLX's own kernel reads a weight of one from memory that the host writes to, and waits for it: it is several
times slower on rows without a weight. Its gradient copies heads if positions come before them in memory.
"""

from typing import Any, cast

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel, literal, takes_dtype

_WARPS = 4
_LARGEST = 4096  # numbers of a row: held in registers

_ROW = """
    constexpr int N = D % 256 == 0 ? 8 : D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;  // read at once by a lane
    constexpr int STEPS = D / (32 * N);
    struct alignas(N * sizeof(T)) Numbers { T at[N]; };
    const size_t row = (size_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const size_t first = row * D + threadIdx.x % 32 * N;

    auto over_lanes = [](float sum) {
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        return sum;
    };
    Numbers numbers[STEPS];
    float squares = 0;
    for (int s = 0; s < STEPS; s++) {
        numbers[s] = *reinterpret_cast<const Numbers*>(x + first + s * 32 * N);
        for (int i = 0; i < N; i++) squares += float(numbers[s].at[i]) * float(numbers[s].at[i]);
    }
    const float inverse = rsqrtf(over_lanes(squares) / D + EPSILON);
"""

_FORWARD = (
    _ROW
    + """
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < N; i++) numbers[s].at[i] = T(float(numbers[s].at[i]) * inverse);
        *reinterpret_cast<Numbers*>(out + first + s * 32 * N) = numbers[s];
    }
"""
)

_BACKWARD = (
    _ROW
    + """
    Numbers gradient[STEPS];
    float along = 0;
    for (int s = 0; s < STEPS; s++) {
        gradient[s] = *reinterpret_cast<const Numbers*>(g + first + s * 32 * N);
        for (int i = 0; i < N; i++) along += float(gradient[s].at[i]) * float(numbers[s].at[i]) * inverse;
    }
    along = over_lanes(along) / D;
    for (int s = 0; s < STEPS; s++) {
        for (int i = 0; i < N; i++) {
            const float n = float(numbers[s].at[i]) * inverse;
            gradient[s].at[i] = T((float(gradient[s].at[i]) - n * along) * inverse);
        }
        *reinterpret_cast<Numbers*>(out + first + s * 32 * N) = gradient[s];
    }
"""
)


def takes_rows(x: mx.array, weight: mx.array | None = None) -> bool:
    """Whether the kernels run here on such rows; without a weight."""
    width = x.shape[-1]
    return weight is None and takes_dtype(x.dtype) and width % 32 == 0 and width <= _LARGEST and x.size > 0


def _rows_of(name: str, source: str, eps: float, *arrays: mx.array) -> mx.array:
    """The kernel over the last axis; heads [B,H,L,D] in the order in which a projection leaves them."""
    x = arrays[0]
    heads = x.ndim == 4 and x.shape[2] > 1
    if heads:
        arrays = tuple(a.swapaxes(1, 2) for a in arrays)
    elif x.ndim == 4:  # of one position: MLX may take them for transposed, and copy them
        arrays = tuple(a.reshape(-1, a.shape[-1]) for a in arrays)
    width = x.shape[-1]
    rows = x.size // width
    warps = _WARPS if rows % _WARPS == 0 else 1
    kernel = cuda_kernel(name, ("x", "g")[: len(arrays)], ("out",), source.replace("EPSILON", literal(eps)))
    (out,) = kernel(
        inputs=list(arrays),
        template=[("T", x.dtype), ("D", width), ("WARPS", warps)],
        grid=(rows * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[arrays[0].shape if heads else x.shape],
        output_dtypes=[x.dtype],
    )
    return out.swapaxes(1, 2) if heads else out


def unit_rms(x: mx.array, weight: None, eps: float) -> mx.array:
    """x / sqrt(mean x² + ε) along the last axis, differentiable; `takes_rows(x)` must hold."""

    @mx.custom_function
    def normal(x: mx.array) -> mx.array:
        return _rows_of("unit_rms", _FORWARD, eps, x)

    @normal.vjp
    def normal_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> Any:
        return _rows_of("unit_rms_gradient", _BACKWARD, eps, x, cotangent.astype(x.dtype))

    return cast(mx.array, normal(x))
