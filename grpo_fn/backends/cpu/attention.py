"""Attention on a CPU: the heads that share keys are one product."""

import mlx.core as mx

from grpo_fn.backends.cpu.elementwise import on_cpu, softmax

__all__ = ["attention", "on_cpu", "weighted_values"]


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """softmax(scale · Q Kᵀ + mask) V of heads [B,H,L,D], in float32; keys and values may have fewer heads."""
    rows, heads, length, _ = queries.shape
    shared, seen = keys.shape[1], keys.shape[2]
    grouped = (rows, shared, heads // shared, length, seen)
    q = (queries * scale).reshape(rows, shared, -1, queries.shape[-1])
    scores = (q @ keys.swapaxes(-1, -2)).reshape(grouped)
    if mask is not None:
        scores = _masked(scores, mask)
    weights = softmax(scores).reshape(rows, shared, -1, seen)
    return (weights @ values).reshape(rows, heads, length, values.shape[-1])


def _masked(scores: mx.array, mask: mx.array | str) -> mx.array:
    """Scores [B,K,H/K,L,T] with a mask that broadcasts to [B,H,L,T] applied."""
    rows, shared, repeats, length, seen = scores.shape
    if isinstance(mask, str):
        mask = mx.arange(seen - length, seen)[:, None] >= mx.arange(seen)[None]
    elif mask.ndim == 4 and mask.shape[1] == 1:
        mask = mask[:, :, None]
    elif mask.ndim > 2:
        mask = mx.broadcast_to(mask, (rows, shared * repeats, length, seen))
        mask = mask.reshape(rows, shared, repeats, length, seen)
    if mask.dtype != mx.bool_:
        return scores + mask
    # The lowest number rather than −∞: a row that sees nothing (padding) stays finite.
    return mx.where(mask, scores, mx.finfo(scores.dtype).min)


def weighted_values(weights: mx.array, values: mx.array) -> mx.array:
    """The product of attention weights and values in float32, which is the faster product on a CPU.

    A sum of two such products is rounded to 16 bits once, as one product over copied prompts is. Rounded
    twice, log-probs were up to 0.12 nats from the learner's.
    """
    return weights.astype(mx.float32) @ values.astype(mx.float32)
