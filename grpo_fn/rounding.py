"""Stochastic rounding, which preserves small updates to 16-bit weights on average.

bfloat16 has 8 bits of precision, float16 has 11. If rounded to nearest, a weight of 1 never changes
under updates of 1e-6. If the sum of weight and update is rounded up with a probability equal to its
position between its two neighbours, the weight changes by 1e-6 on average (Gupta et al. 2015, arXiv
1502.02551; for bfloat16 weights Zamirai et al. 2020, arXiv 2010.06192).
"""

import math
from collections.abc import Callable

import mlx.core as mx

from grpo_fn.checks import check_dtype
from grpo_fn.prng import fold_in_rows
from grpo_fn.trees import Tree, arrays_of

# the float32 bits of bfloat16's largest number and of inf
_LARGEST, _INFINITY = 0x7F7F0000, 0x7F800000
_QUIET = 0x0040  # set in the upper half of a NaN, whose payload may be only in the lower half


def stochastic_round(x: mx.array, key: mx.array, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """Rounds each number at random to one of its two 16-bit neighbours, so that its expected value
    is the number itself.

    bfloat16 is float32 without the lower half of its bits: 16 random bits are added to that half,
    and a carry rounds away from zero. Numbers that the dtype can represent do not change, including
    infinities and NaN. Finite numbers beyond the dtype's largest number have no second neighbour;
    they become that number and never infinity.

    Args:
        x: float32 of any shape.
        key: PRNG key, uint32 [2]. The random bits of different numbers are independent.
        dtype: bfloat16 or float16.

    Returns:
        An array of the same shape in that dtype.

    Raises:
        ValueError: x is not float32, or the dtype is not supported.
    """
    check_dtype("x", x, mx.float32)
    if dtype == mx.float16:
        return _as_float16(x, key)
    check_dtype("the result", mx.zeros((), dtype), mx.bfloat16)
    bits = x.view(mx.uint32)
    size = bits & 0x7FFFFFFF
    upper = (bits + mx.where(size < _LARGEST, _random_16(x.shape, key), 0)) >> 16
    upper = mx.where(size > _INFINITY, upper | _QUIET, upper)
    return upper.astype(mx.uint16).view(mx.bfloat16)


def _as_float16(x: mx.array, key: mx.array) -> mx.array:
    """Rounds to float16. Neighbours are 2^(e − 10) apart, where 2^e is the number's own power of
    two, at least 2^−14.
    """
    exponent = mx.clip(x.view(mx.uint32) >> 23 & 255, 113, 142)  # e + 127
    gap = (exponent - 10 << 23).view(mx.float32)
    # the bits of float32 beyond float16's 11
    share = (_random_16(x.shape, key) >> 3).astype(mx.float32) / 2**13
    drawn = mx.clip(mx.floor(x / gap + share) * gap, -65504, 65504)
    return mx.where(mx.isfinite(x), drawn, x).astype(mx.float16)


def _random_16(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Returns random uint16 numbers, which are the halves of split keys, that is, MLX's raw random
    bits.
    """
    size = math.prod(shape)
    words_n2 = mx.random.split(key, -(-size // 4))
    return words_n2.view(mx.uint16).reshape(-1)[:size].reshape(shape)


def storing(tree: Tree, key: mx.array) -> Callable[[mx.array, mx.array], mx.array]:
    """Returns `store(new, old)`, which converts a new value to the old value's dtype; from float32
    to 16 bits, it uses `stochastic_round`.

    Each call uses its own key; there is one key for each leaf of the tree.
    """
    count = sum(1 for _ in arrays_of(tree))
    keys = iter(fold_in_rows(mx.broadcast_to(key[None], (count, 2)), mx.arange(count)))

    def store(new: mx.array, old: mx.array) -> mx.array:
        own = next(keys)
        if new.dtype == mx.float32 and old.dtype in (mx.bfloat16, mx.float16):
            return stochastic_round(new, own, old.dtype)
        return new.astype(old.dtype)

    return store
