"""Per-token estimators of KL(π_θ ‖ π_ref) from the log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL divergence" (2020). With y = log π_ref − log π_θ of a token that
π_θ sampled, all three have KL as their mean (k2 to second order); they differ in variance and sign.
"""

from collections.abc import Callable

import mlx.core as mx

from grpo_fn.guards import check_choice, clamp_log

K3_LIMIT = 1e4  # a single token past this says "broken", not "how broken"


def k1(y: mx.array) -> mx.array:
    """−y: unbiased, either sign."""
    return -y


def k2(y: mx.array) -> mx.array:
    """y²/2: never negative, biased in the third order; its gradient is that of KL(π_θ ‖ π_ref)."""
    return mx.square(y) / 2


def k3(y: mx.array) -> mx.array:
    """exp(y) − y − 1: unbiased and never negative; at most 1e4."""
    return mx.minimum(mx.exp(y) - y - 1, K3_LIMIT)


ESTIMATORS: dict[str, Callable[[mx.array], mx.array]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(kind: str, logp: mx.array, ref_logp: mx.array) -> mx.array:
    """Estimate KL(π_θ ‖ π_ref) at each token.

    Args:
        kind: `k1`, `k2` or `k3`.
        logp: log π_θ of the sampled tokens, any shape, nats, float32.
        ref_logp: log π_ref of the same tokens, the same shape.

    Returns:
        The estimate in nats, the same shape; gradients flow through `logp`.

    Raises:
        ValueError: `kind` is unknown.
    """
    check_choice("kl", kind, ESTIMATORS)
    return ESTIMATORS[kind](clamp_log(ref_logp - logp))
