"""A CUDA kernel that computes a whole decoder block for one token per row: norms, products,
attention and MLP.

In MLX, a decoding step launches about 300 operations. Each operation costs the host 5 to 13 µs,
which adds up to twice the time that the device needs. The kernel here computes a whole block in a
single launch.

    n = norm(x);   q, k, v = n W_qkv (+ b);   a = attention(rope(q), rope(k), v);   h = x + a W_o
    n = norm(h);   f = silu(n W_gate) · n W_up, or relu(n W_up)²;                   y = h + f W_down
"""

import re
from typing import NamedTuple

import attrs
import mlx.core as mx

from grpo_fn.backends.cuda.decoding.attention_source import (
    HEAD_WIDTHS,
    MMA,
    MOST_SHARING,
    warps_of_row,
)
from grpo_fn.backends.cuda.decoding.block_source import SOURCE
from grpo_fn.backends.cuda.kernels import (
    DeviceLimits,
    compiles,
    cuda_kernel,
    device_limits,
    literal,
)
from grpo_fn.backends.mechanisms import has_cuda

# Most multiplications per block, for all rows. The kernel's products run at an estimated sixth of
# cuBLAS's rate: with more work, the kernel costs the device more time than it saves the host.
MOST_PRODUCTS = 8e9
_TILE_ROWS = 128  # rows per tile; fewer rows take the same time
MOST_WIDTH = 4096  # largest D: one block of threads normalises a row
_THREADS = 512  # of a block
_STAGE = (128 + 64) * 128  # bytes per stage of the ring buffer
_MOST_STAGES, _LEAST_STAGES = 6, 3


@attrs.frozen
class BlockShape:
    """The sizes for which the kernel is compiled."""

    width: int  # D
    heads: int
    shared: int  # key heads
    head_width: int
    hidden: int  # F
    gated: bool  # silu(gate) · up; else relu(up)²
    biased: bool  # queries, keys and values
    # norms of queries and keys: 0 none, 1 weighted, before the rotation, 2 unweighted, after it
    head_norms: int
    scale: float
    eps: float

    @property
    def products(self) -> int:
        """Number of multiplications per row, which equals the number of weights."""
        heads = self.head_width * (2 * self.heads + 2 * self.shared)
        return self.width * (heads + self.hidden * (3 if self.gated else 2))

    def fault(self) -> str | None:
        """Returns the reason why the kernel does not support this shape, or None if the kernel
        supports it.
        """
        queries, keys = (number * self.head_width for number in (self.heads, self.shared))
        sizes = {"width": self.width, "queries": queries, "keys": keys, "hidden": self.hidden}
        for name, size in sizes.items():
            if size % 64:
                return f"{name} of {size}: expected a multiple of 64"
        if self.width > MOST_WIDTH:
            return f"width of {self.width}: expected at most {MOST_WIDTH}"
        if self.head_width not in HEAD_WIDTHS:
            return f"heads of {self.head_width}: expected 64 or 128"
        if self.heads % self.shared or self.heads // self.shared > MOST_SHARING:
            over = f"{self.heads} query heads over {self.shared}"
            return f"{over}: expected at most {MOST_SHARING} to share keys"
        return None


class Weights(NamedTuple):
    """The weights of a decoder block. Matrices are [out,in]; None means that the block does not
    have this weight.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    o: mx.array
    up: mx.array
    down: mx.array
    gate: mx.array | None = None
    norm_1: mx.array | None = None
    norm_2: mx.array | None = None
    q_bias: mx.array | None = None
    k_bias: mx.array | None = None
    v_bias: mx.array | None = None
    q_norm: mx.array | None = None
    k_norm: mx.array | None = None


# Names in the source, in the order of `Weights`. Weights that a block may lack are in capitals.
_NAMES = ("wq", "wk", "wv", "wo", "wu", "wd", "wg", "n1", "n2", "bq", "bk", "bv", "qn", "kn")
_REQUIRED = 6
_CACHE_NAMES = ("turns", "prompt_keys", "prompt_values", "own_keys", "own_values")
_CACHE_NAMES += ("prompt_of", "lengths", "own_lengths", "barrier")


def takes_block(shape: BlockShape, weights: Weights, rows: int) -> bool:
    """Returns whether the kernel supports this device, block and number of rows."""
    dtypes = {weight.dtype for weight in weights if weight is not None}
    return (
        has_cuda()
        and compiles("sm_80")
        and (limits := device_limits()) is not None
        and _stages(limits) >= _LEAST_STAGES
        and len(dtypes) == 1
        and dtypes <= set(MMA)
        and -(-rows // _TILE_ROWS) * _TILE_ROWS * shape.products <= MOST_PRODUCTS
        and shape.fault() is None
    )


def block_step(
    shape: BlockShape,
    weights: Weights,
    x: mx.array,
    turns: mx.array,
    prompt: tuple[mx.array, mx.array],
    own: tuple[mx.array, mx.array],
    prompt_of_b: mx.array,
    lengths_p: mx.array,
    own_length_b: mx.array,
    barrier: mx.array,
) -> mx.array:
    """Computes the block's output [B,1,D] for one token per row, and writes the token's key and
    value into the row's buffers.

    Args:
        shape, weights: the block; `takes_block` must accept it.
        x: [B,1,D].
        turns: [B,HD] float32: cosines and sines of the rotation at each row's position.
        prompt, own, prompt_of_b, lengths_p, own_length_b: see
            `prefix_attention.append_and_attend`.
        barrier: uint32 [64], initially zeros. Launches that may run at the same time must not share
            it.
    """
    device = device_limits()
    assert device is not None
    rows = x.shape[0]
    groups = device.multiprocessors
    stages = _stages(device)
    present = [
        (name, weight) for name, weight in zip(_NAMES, weights, strict=True) if weight is not None
    ]
    names = ("x", *(name for name, _ in present), *_CACHE_NAMES)
    inputs = [x, *(weight for _, weight in present), turns, *prompt, *own]
    inputs += [prompt_of_b, lengths_p, own_length_b, barrier]
    source = SOURCE.replace("EPSILON", literal(shape.eps)).replace("SCALE", literal(shape.scale))
    source = source.replace("MMA", MMA[x.dtype])
    for name in _NAMES[_REQUIRED:]:
        there = name if name in names else "((const T*)nullptr)"
        source = re.sub(rf"\b{name.upper()}\b", there, source)
    nq, nkv = shape.heads * shape.head_width, shape.shared * shape.head_width
    qkv = _split(nq + 2 * nkv, shape.width, groups)
    out = _split(shape.width, nq, groups)
    down = _split(shape.width, shape.hidden, groups)
    splits = {"SPLIT_QKV": qkv, "SPLIT_O": out, "SPLIT_DOWN": down}
    most_sums = max(qkv * (nq + 2 * nkv), max(out, down) * shape.width)
    sizes = (most_sums * 2 + 2 * shape.width + nq + shape.hidden) * rows // 2  # float32 numbers
    kernel = cuda_kernel("decoder_block", names, ("y", "scratch"), source)
    y, _ = kernel(
        inputs=inputs,
        template=[
            ("T", x.dtype),
            ("D", shape.width),
            ("HEADS", shape.heads),
            ("SHARED", shape.shared),
            ("HD", shape.head_width),
            ("F", shape.hidden),
            ("GATED", shape.gated),
            ("BIASED", shape.biased),
            ("HEAD_NORMS", shape.head_norms),
            ("MOST_SUMS", most_sums),
            *splits.items(),
            ("GROUP", 32 * warps_of_row(rows * shape.shared, groups * _THREADS // 32)),
            ("THREADS", _THREADS),
            ("STAGES", stages),
            ("RING", stages * _STAGE),
        ],
        grid=(groups * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[x.shape, (sizes,)],
        output_dtypes=[x.dtype, mx.float32],
        shared_memory=stages * _STAGE,
    )
    return y


def _split(columns: int, depth: int, groups: int) -> int:
    """Returns the number of parts into which K is split, so that there are about as many items as
    multiprocessors for 128 rows.
    """
    steps = depth // 64
    parts = max(1, min(steps, groups // (columns // 64)))
    return -(-steps // -(-steps // parts))


def _stages(limits: DeviceLimits) -> int:
    """Returns the number of ring-buffer stages that fit in shared memory, of which 1 KiB is
    reserved.
    """
    return min(_MOST_STAGES, (limits.shared_bytes - 1024) // _STAGE)
