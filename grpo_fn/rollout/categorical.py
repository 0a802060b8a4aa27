"""Draws a token of each row by inverting the cumulative distribution level by level.

A float32 running sum over a large vocabulary loses every weight below 2^−24 of the sum before it: a third of
150,000 nearly equal tokens. And a random number in float32 has at most 24 bits. So the vocabulary is cut into
groups of `WIDTH` tokens, and a large one into blocks of `WIDTH` groups. A block is drawn, then a group of it,
then a token of that, each with its own 32 random bits.

A draw counts in integers, whose sums are exact: a weight is its share of 2^30, rounded up. So no token with a
weight is lost. Weights below 2^−30 at their level are drawn too often: in at most 2e-7 of all draws.
"""

import mlx.core as mx

WIDTH = 32  # tokens of a group, groups of a block
RANDOM_NUMBERS = 3  # 32-bit random numbers of a draw: for the token, its group, its block
_WHOLE = 2.0**30


def draw(weights_bv: mx.array, bits_bw: mx.array) -> tuple[mx.array, mx.array]:
    """The token of each row, and the sum of the row's weights: (int32 [B], float32 [B]).

    A row without any weight above zero gives token 0.

    Args:
        weights_bv: float32, none below zero; they need not add up to 1.
        bits_bw: random bits, uint32 [B,`RANDOM_NUMBERS`]. Equal bits and weights give equal tokens.
    """
    levels = [_grouped(weights_bv)]
    while len(levels) < RANDOM_NUMBERS - 1 and levels[-1].shape[1] > WIDTH:
        levels.append(_grouped(levels[-1].sum(axis=-1)))
    sums_bn = levels[-1].sum(axis=-1)
    total_b1 = sums_bn.sum(axis=-1, keepdims=True)
    place_b1 = _inverted(sums_bn, total_b1, bits_bw[:, len(levels), None])
    for level in reversed(range(len(levels))):
        members_bn = mx.take_along_axis(levels[level], place_b1[:, :, None], axis=1)[:, 0]
        inside_b1 = _inverted(members_bn, members_bn.sum(axis=-1, keepdims=True), bits_bw[:, level, None])
        place_b1 = place_b1 * WIDTH + inside_b1
    return place_b1[:, 0].astype(mx.int32), total_b1[:, 0]


def _grouped(weights_bn: mx.array) -> mx.array:
    """[B,N] as [B,N/WIDTH,WIDTH]; zeros fill up the last group."""
    missing = -weights_bn.shape[1] % WIDTH
    if missing:
        weights_bn = mx.pad(weights_bn, [(0, 0), (0, missing)])
    return weights_bn.reshape(weights_bn.shape[0], -1, WIDTH)


def _inverted(weights_bn: mx.array, total_b1: mx.array, word_b1: mx.array) -> mx.array:
    """The first place whose cumulative count lies above word / 2^32 of all: never one of weight zero."""
    scale_b1 = mx.where(total_b1 > 0, _WHOLE / total_b1, 0.0)  # 0 for NaN
    counts_bn = mx.where(weights_bn > 0, (weights_bn * scale_b1).astype(mx.int32) + 1, 0)
    upto_bn = mx.cumsum(counts_bn, axis=-1)
    all_b1 = upto_bn[:, -1:]
    wanted_b1 = ((all_b1.astype(mx.uint64) * word_b1) >> 32).astype(mx.int32)
    # Without any count, no place is above 0, and the result would be one past the end.
    wanted_b1 = mx.where(all_b1 > 0, wanted_b1, -1)
    return (upto_bn <= wanted_b1).sum(axis=-1, keepdims=True)
