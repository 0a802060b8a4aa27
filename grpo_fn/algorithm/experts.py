"""Computes how evenly tokens are distributed over experts, and the loss that balances the
distribution.

    loss = E · Σ_e f_e · P_e        f_e = share of the choices of expert e (a constant)
                                    P_e = mean over tokens of softmax(router logits)_e

The loss is Switch Transformer's (arXiv 2101.03961, eq. 4–6), with k choices per token instead of
one. The loss is 1 for even shares, and up to E/k if all tokens use the same k experts.
"""

import mlx.core as mx

from grpo_fn.checks import check_rank, check_shape


def expert_shares(logits_ne: mx.array, mask_n: mx.array, experts_per_token: int) -> mx.array:
    """Computes f_e, each expert's share of the choices made for all unmasked tokens: float32 [E],
    without a gradient.

    Args:
        logits_ne: a router's logits [N,E]; each row's k largest are the chosen experts.
        mask_n: True for tokens that count, [N].
        experts_per_token: k.

    Raises:
        ValueError: a shape is wrong, or k is not in 1 … E.
    """
    check_rank("logits_ne", logits_ne, 2)
    tokens, experts = logits_ne.shape
    check_shape("mask_n", mask_n, (tokens,))
    if not 1 <= experts_per_token <= experts:
        raise ValueError(
            f"experts_per_token = {experts_per_token}: expected 1 to {experts}, the experts"
        )
    order_ne = mx.argpartition(-mx.stop_gradient(logits_ne), kth=experts_per_token - 1, axis=-1)
    weight_nk = mx.broadcast_to(mask_n.astype(mx.float32)[:, None], (tokens, experts_per_token))
    counts_e = mx.zeros((experts,)).at[order_ne[:, :experts_per_token]].add(weight_nk)
    return counts_e / mx.maximum(counts_e.sum(), 1)


def load_balancing_loss(logits_ne: mx.array, mask_n: mx.array, experts_per_token: int) -> mx.array:
    """Returns E · Σ_e f_e · P_e over one router's unmasked tokens (0-d float32), or 0 if all tokens
    are masked.

    The loss is differentiable with respect to the logits only through P. For arguments and errors,
    see `expert_shares`.
    """
    share_e = expert_shares(logits_ne, mask_n, experts_per_token)
    counted_n1 = mask_n.astype(mx.bool_)[:, None]
    probs_ne = mx.softmax(mx.where(counted_n1, logits_ne.astype(mx.float32), 0), axis=-1)
    prob_e = mx.where(counted_n1, probs_ne, 0).sum(axis=0) / mx.maximum(counted_n1.sum(), 1)
    return logits_ne.shape[-1] * (share_e * prob_e).sum()
