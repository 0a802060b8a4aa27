"""Calibrated rounding: a thread for each row of a block of columns, or for each group of weights."""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import cuda_kernel, literal

_THREADS, _ROWS = 128, 64  # of a block of threads
_COLUMNS = """
const int row = blockIdx.x * THREADS + threadIdx.x, rows = w_shape[1], width = w_shape[2];
if (row >= rows) return;
const long block = blockIdx.y, at = block * rows + row;
const unsigned int* places = order + block * width;
const float* shares = share + block * width * width;
float* errors = error + block * width * rows + row;  // of column k at [k * rows]
for (int first = 0; first < width; first += COLUMNS) {
    float x[COLUMNS];
    #pragma unroll
    for (int k = 0; k < COLUMNS; k++) x[k] = w[at * width + places[first + k]];
    #pragma unroll 4
    for (int before = 0; before < first; before++) {
        const float off = errors[(long)before * rows];
        const float4* carried = (const float4*)(shares + (long)before * width + first);
        #pragma unroll
        for (int k = 0; k < COLUMNS / 4; k++) {
            const float4 part = carried[k];
            x[4 * k] -= off * part.x;
            x[4 * k + 1] -= off * part.y;
            x[4 * k + 2] -= off * part.z;
            x[4 * k + 3] -= off * part.w;
        }
    }
    #pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        const int column = places[first + k];
        const long place = at * scale_shape[2] + column / GROUP;
        const float s = scale[place], b = bias[place];
        const float code = fminf(fmaxf(rintf((x[k] - b) / s), 0.0f), (float)MOST);
        const float off = x[k] - (code * s + b);
        codes[at * width + column] = (unsigned char)code;
        errors[(long)(first + k) * rows] = off;
        const float* carried = shares + (long)(first + k) * width + first;
        #pragma unroll
        for (int later = k + 1; later < COLUMNS; later++) x[later] -= off * carried[later];
    }
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


def round_columns(
    w_now: mx.array,
    scale_nog: mx.array,
    bias_nog: mx.array,
    order_nw: mx.array,
    share_nww: mx.array,
    mode: Any,
) -> mx.array:
    """As `policy.calibration._round_columns`."""
    blocks, out, width = w_now.shape
    numbers = {"COLUMNS": 32, "GROUP": mode.group_size, "MOST": 2**mode.bits - 1, "THREADS": _ROWS}
    names = ("w", "scale", "bias", "order", "share"), ("codes", "error")
    return cuda_kernel("round_columns", *names, _COLUMNS)(
        inputs=[w_now, scale_nog, bias_nog, order_nw, share_nww.astype(mx.float32)],
        template=list(numbers.items()),
        output_shapes=[w_now.shape, (blocks, width, out)],
        output_dtypes=[mx.uint8, mx.float32],
        grid=(-(-out // _ROWS) * _ROWS, blocks, 1),
        threadgroup=(_ROWS, 1, 1),
    )[0]


def group_ranges(
    bits: int, group: int, dtype: mx.Dtype, shrinks: tuple[float, ...]
) -> Callable[..., tuple[mx.array, mx.array]]:
    """As `policy.calibration._ranges`."""
    return functools.partial(_group_ranges, bits, group, dtype, shrinks)


def _group_ranges(
    bits: int,
    group: int,
    dtype: mx.Dtype,
    shrinks: tuple[float, ...],
    w_now: mx.array,
    weight_nw: mx.array,
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
        grid=(-(-(w_now.size // group) // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )
    return scale_nog, bias_nog
