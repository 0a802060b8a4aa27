"""Computes attention over whole sequences in float32, with one BLAS product per key head.

MLX uses one product for each row and head, and its softmax computes one exponential at a time.
Here, query heads that share keys are additional rows of the same product, and the softmax is from
`elementwise`.
"""

from typing import Any, cast

import mlx.core as mx

from grpo_fn.backends.cpu.elementwise import softmax, softmax_gradient

# more scores than this are left to MLX, whose softmax needs no second array of that size
_MOST_SCORES = 2**23


def takes_sequences(queries: mx.array, keys: Any, mask: mx.array | str | None) -> bool:
    """Returns whether `attention` supports these arguments: float32, several tokens per row, a
    causal or boolean mask.
    """
    if not isinstance(keys, mx.array) or queries.dtype != mx.float32 or keys.dtype != mx.float32:
        return False
    known = mask.dtype == mx.bool_ if isinstance(mask, mx.array) else mask in (None, "causal")
    scores = queries.size // queries.shape[-1] * keys.shape[-2]
    # a decoding step has one token per row
    return known and queries.shape[-2] > 1 and scores <= _MOST_SCORES


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Computes softmax(scale · Q Kᵀ where the mask is True) V ("Attention is all you need", arXiv
    1706.03762, eq. 1).

    Args:
        queries: [B,H,L,D].
        keys: [B,K,S,D], H a multiple of K.
        values: [B,K,S,Dv].
        scale: the factor of the attention scores.
        mask: booleans, broadcast to [B,H,L,S]; "causal", where the L queries are the last of the S
            tokens; or None for no mask.

    Returns:
        [B,H,L,Dv].
    """
    rows, heads, length, width = queries.shape
    shared, seen = keys.shape[1:3]
    if isinstance(mask, str):
        mask = mx.tril(mx.ones((length, seen), mx.bool_), seen - length)
    scores = mx.multiply(scale, queries).reshape(rows, shared, -1, width) @ keys.swapaxes(-1, -2)
    weights = softmax(scores) if mask is None else cast(mx.array, _masked_softmax(scores, mask))
    return (weights @ values).reshape(rows, heads, length, -1)


@mx.custom_function
def _masked_softmax(scores: mx.array, mask: mx.array) -> mx.array:
    """Computes softmax for scores [B,K,H/K·L,S] where the mask, broadcast to [B,H,L,S], is True."""
    rows, _, _, seen = scores.shape
    by_head = scores.reshape(rows, -1, mask.shape[-2], seen)
    return softmax(mx.where(mask, by_head, mx.finfo(mx.float32).min).reshape(scores.shape))


@_masked_softmax.vjp
def _masked_softmax_vjp(
    primals: Any, cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array]:
    # Where the mask is False the weight is 0, and so is the score's gradient. Only a row without
    # any True has other weights: that of a position which is no token, which no token sees, and
    # whose cotangent is 0.
    return softmax_gradient(output, cotangent), mx.zeros_like(primals[1])
