"""Calibrated rounding: a thread for each row of a few columns, or for each group of weights."""

import functools
from collections.abc import Callable

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel, literal

_THREADS = 128
_COLUMNS = """
const long row = (long)blockIdx.x * THREADS + threadIdx.x;
if (row >= (long)w_shape[0] * w_shape[1]) return;
const long block = row / w_shape[1];
const float* carried = share + block * COLUMNS * COLUMNS;
float x[COLUMNS];
#pragma unroll
for (int k = 0; k < COLUMNS; k++) x[k] = w[row * COLUMNS + k];
#pragma unroll
for (int k = 0; k < COLUMNS; k++) {
    const long place = row * scale_shape[2] + groups[block * COLUMNS + k];
    const float s = scale[place], b = bias[place];
    const float code = fminf(fmaxf(rintf((x[k] - b) / s), 0.0f), (float)MOST);
    const float off = x[k] - (code * s + b);
    codes[row * COLUMNS + k] = (unsigned char)code;
    error[row * COLUMNS + k] = off;
    #pragma unroll
    for (int later = k + 1; later < COLUMNS; later++) x[later] -= off * carried[k * COLUMNS + later];
}
"""
_RANGES = """
const long at = (long)blockIdx.x * THREADS + threadIdx.x;
const int groups = w_shape[2] / GROUP;
if (at >= (long)w_shape[0] * w_shape[1] * groups) return;
const float* heavy = weight + at / groups / w_shape[1] * w_shape[2] + at % groups * GROUP;
float x[GROUP], low = INFINITY, high = -INFINITY, least = INFINITY;
#pragma unroll
for (int k = 0; k < GROUP; k++) {
    x[k] = w[at * GROUP + k];
    low = fminf(low, x[k]);
    high = fmaxf(high, x[k]);
}
const float shrinks[] = {SHRINKS};
for (int n = 0; n < TRIED; n++) {
    const float s = (float)(T)fmaxf(shrinks[n] * (high - low) / MOST, 1e-7f);
    const float b = (float)(T)(rintf(shrinks[n] * low / s) * s);
    float sum = 0;
    #pragma unroll
    for (int k = 0; k < GROUP; k++) {
        const float off = x[k] - (fminf(fmaxf(rintf((x[k] - b) / s), 0.0f), (float)MOST) * s + b);
        sum += off * off * heavy[k];
    }
    if (n == 0 || sum < least) {
        least = sum;
        scale[at] = sum == sum ? s : sum;  // a weight that is NaN
        bias[at] = b;
    }
}
"""


def round_columns(bits: int) -> Callable[..., tuple[mx.array, mx.array]]:
    """As `policy.calibration._columns`."""
    return functools.partial(_round_columns, bits)


def group_ranges(
    bits: int, group: int, dtype: mx.Dtype, shrinks: tuple[float, ...]
) -> Callable[..., tuple[mx.array, mx.array]]:
    """As `policy.calibration._ranges`."""
    return functools.partial(_group_ranges, bits, group, dtype, shrinks)


def _round_columns(
    bits: int,
    scale_nog: mx.array,
    bias_nog: mx.array,
    w_now: mx.array,
    groups_nw: mx.array,
    share_nww: mx.array,
) -> tuple[mx.array, mx.array]:
    names = ("scale", "bias", "w", "groups", "share"), ("codes", "error")
    codes_now, error_now = cuda_kernel("round_columns", *names, _COLUMNS)(
        inputs=[scale_nog, bias_nog, w_now, groups_nw, share_nww],
        template=[("COLUMNS", w_now.shape[-1]), ("MOST", 2**bits - 1), ("THREADS", _THREADS)],
        output_shapes=[w_now.shape, w_now.shape],
        output_dtypes=[mx.uint8, mx.float32],
        grid=_grid(w_now.shape[0] * w_now.shape[1]),
        threadgroup=(_THREADS, 1, 1),
    )
    return codes_now, error_now


def _group_ranges(
    bits: int, group: int, dtype: mx.Dtype, shrinks: tuple[float, ...], w_now: mx.array, weight_nw: mx.array
) -> tuple[mx.array, mx.array]:
    source = _RANGES.replace("SHRINKS", ", ".join(literal(shrink) for shrink in shrinks))
    numbers = {"GROUP": group, "MOST": 2**bits - 1, "TRIED": len(shrinks), "THREADS": _THREADS}
    blocks, out, width = w_now.shape
    shape = blocks, out, width // group
    scale_nog, bias_nog = cuda_kernel("group_ranges", ("w", "weight"), ("scale", "bias"), source)(
        inputs=[w_now, weight_nw],
        template=[("T", dtype), *numbers.items()],
        output_shapes=[shape, shape],
        output_dtypes=[mx.float32, mx.float32],
        grid=_grid(w_now.size // group),
        threadgroup=(_THREADS, 1, 1),
    )
    return scale_nog, bias_nog


def _grid(threads: int) -> tuple[int, int, int]:
    return (-(-threads // _THREADS) * _THREADS, 1, 1)
