"""Kernels for calibrated rounding. One kernel rounds: each block of threads processes several rows
of a block of columns. The other kernel computes ranges: each thread processes one group of columns.
"""

import functools
from collections.abc import Callable

import mlx.core as mx

from grpo_fn.backends.cuda.kernels import compiles, cuda_kernel, literal

_THREADS = 128  # threads per block, for ranges
_TILE = 64  # rows and columns that a block of 256 threads processes at a time
# For each tile of columns, the errors of all earlier columns are first carried over by a product on
# tensor cores. Then the tile's columns are rounded one after another; four neighbouring threads
# share a row.
_COLUMNS = """
#define EACH (COLUMNS / 4)
const int out = w_shape[1], width = w_shape[2], per_block = (out + ROWS - 1) / ROWS;
const long block = blockIdx.x / per_block, place = blocks[block];
const int first = blockIdx.x % per_block * ROWS;
const unsigned int* order_of = order + place * width;
const bfloat16* share_of = share + place * width * width;
const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
const int row = threadIdx.x / 4, top = warp % 4 * 16 + group, left = warp / 4 * (COLUMNS / 2);
const bool inside = first + row < out;
const long at = block * out + (inside ? first + row : out - 1);
__shared__ float carried[ROWS][COLUMNS + 4];
__shared__ __align__(16) float buffer[ROWS * 80];
unsigned int* a = (unsigned int*)buffer;  // errors of 32 columns, [ROWS][36]
unsigned int* b = a + ROWS * 36;  // and their share, [32][COLUMNS + 8]
for (int base = 0; base < width; base += COLUMNS) {
    float sum[COLUMNS / 16][4] = {};
    for (int k = 0; k < base; k += 32) {
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * 32; i += THREADS) {
            const int r = i / 32, c = i % 32;
            const float x = first + r < out ? error[(block * out + first + r) * width + k + c] : 0.0f;
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(a[r * 36 + c]) : "f"(x));
        }
        for (int i = threadIdx.x; i < 32 * COLUMNS; i += THREADS) {
            const int r = i / COLUMNS, c = i % COLUMNS;
            b[r * (COLUMNS + 8) + c] = __float_as_uint(share_of[(long)(k + r) * width + base + c]);
        }
        __syncthreads();
        #pragma unroll
        for (int part = 0; part < 32; part += 8) {
            const unsigned int *x = a + top * 36 + part + quarter, *y = b + (part + quarter) * (COLUMNS + 8);
            #pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                const int c = left + n * 8 + group;
                asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                    : "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
                    : "r"(x[0]), "r"(x[8 * 36]), "r"(x[4]), "r"(x[8 * 36 + 4]),
                      "r"(y[c]), "r"(y[4 * (COLUMNS + 8) + c]));
            }
        }
    }
    #pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            carried[top + i / 2 * 8][left + n * 8 + quarter * 2 + i % 2] = sum[n][i];
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS * COLUMNS; i += THREADS) {
        const int k = i / COLUMNS, c = i % COLUMNS;  // beside one another: what a thread reads
        buffer[k * 80 + c % 4 * 20 + c / 4] = share_of[(long)(base + k) * width + base + c];
    }
    float x[EACH], s[EACH], low[EACH];
    unsigned int found[EACH / 4] = {};
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int c = quarter + 4 * i, column = order_of[base + c];
        x[i] = (float)w[at * width + column] - carried[row][c];
        s[i] = scale[at * scale_shape[2] + column / GROUP];
        low[i] = bias[at * scale_shape[2] + column / GROUP];
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < COLUMNS; k++) {
        const float steps = rintf(__fdividef(x[k / 4] - low[k / 4], s[k / 4]));
        const float code = fminf(fmaxf(steps, 0.0f), (float)MOST);
        const float off = x[k / 4] - (code * s[k / 4] + low[k / 4]);
        const float passed = __shfl_sync(0xffffffff, off, k % 4, 4);
        #pragma unroll
        for (int i = k / 16 * 4; i < EACH; i += 4) {
            const float4 h = *(const float4*)&buffer[k * 80 + quarter * 20 + i];  // 0 left of column k
            x[i] -= passed * h.x, x[i + 1] -= passed * h.y;
            x[i + 2] -= passed * h.z, x[i + 3] -= passed * h.w;
        }
        if (quarter == k % 4) {
            x[k / 4] = off;
            found[k / 16] |= (unsigned int)code << k / 4 % 4 * 8;
        }
    }
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (!inside) continue;
        codes[at * width + order_of[base + quarter + 4 * i]] = found[i / 4] >> i % 4 * 8;
        error[at * width + base + quarter + 4 * i] = x[i];
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
    x[k] = (float)w[at * GROUP + k];
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


def tensor_cores() -> bool:
    """Returns whether `round_columns` supports this device."""
    return compiles("sm_80")


def round_columns(bits: int, group: int) -> Callable[..., mx.array]:
    """Returns a function that computes the same as that of `policy.calibration._codes`."""
    return functools.partial(_round_columns, bits, group)


def group_ranges(
    bits: int, group: int, dtype: mx.Dtype, shrinks: tuple[float, ...]
) -> Callable[..., tuple[mx.array, mx.array]]:
    """Returns a function that computes the same as that of `policy.calibration._ranges`."""
    return functools.partial(_group_ranges, bits, group, dtype, shrinks)


def _round_columns(
    bits: int,
    group: int,
    w_now: mx.array,
    scale_nog: mx.array,
    bias_nog: mx.array,
    blocks_n: mx.array,
    order_kw: mx.array,
    share_kww: mx.array,
) -> mx.array:
    blocks, out, width = w_now.shape
    columns = _TILE if width % _TILE == 0 else 32
    numbers = {
        "COLUMNS": columns,
        "ROWS": _TILE,
        "MOST": 2**bits - 1,
        "GROUP": group,
        "THREADS": 256,
    }
    names = ("w", "scale", "bias", "blocks", "order", "share")
    codes_now, _ = cuda_kernel("round_columns", names, ("codes", "error"), _COLUMNS)(
        inputs=[w_now, scale_nog, bias_nog, blocks_n, order_kw, share_kww],
        template=list(numbers.items()),
        output_shapes=[w_now.shape, w_now.shape],
        output_dtypes=[mx.uint8, mx.float32],
        grid=(blocks * -(-out // _TILE) * 256, 1, 1),
        threadgroup=(256, 1, 1),
    )
    return codes_now


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
        grid=(-(-w_now.size // group // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )
    return scale_nog, bias_nog
