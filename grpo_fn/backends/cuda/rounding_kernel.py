"""Columns rounded one after another with their errors carried on, a thread for each row."""

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel

_THREADS = 128
_SOURCE = """
const long row = (long)blockIdx.x * THREADS + threadIdx.x;
if (row >= (long)w_shape[0] * w_shape[1]) return;
const float* carried = share + row / w_shape[1] * COLUMNS * COLUMNS;
float x[COLUMNS];
#pragma unroll
for (int k = 0; k < COLUMNS; k++) x[k] = w[row * COLUMNS + k];
#pragma unroll
for (int k = 0; k < COLUMNS; k++) {
    const long place = row * COLUMNS + k;
    const float s = scale[place], b = bias[place];
    const float code = fminf(fmaxf(rintf((x[k] - b) / s), 0.0f), (float)MOST);
    const float off = x[k] - (code * s + b);
    codes[place] = code;
    error[place] = off;
    #pragma unroll
    for (int later = k + 1; later < COLUMNS; later++) x[later] -= off * carried[k * COLUMNS + later];
}
"""


def round_columns(
    bits: int, w_now: mx.array, scale_now: mx.array, bias_now: mx.array, share_nww: mx.array
) -> tuple[mx.array, mx.array]:
    """Codes and errors, float32 [N,O,W], of few columns in so many bits; `policy.calibration._rounded`."""
    blocks, out, columns = w_now.shape
    kernel = cuda_kernel("round_columns", ("w", "scale", "bias", "share"), ("codes", "error"), _SOURCE)
    codes_now, error_now = kernel(
        inputs=[w_now, scale_now, bias_now, share_nww],
        template=[("COLUMNS", columns), ("MOST", 2**bits - 1), ("THREADS", _THREADS)],
        grid=(-(-blocks * out // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[w_now.shape, w_now.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return codes_now, error_now
