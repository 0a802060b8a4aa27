"""Per-token estimators of KL(π_θ ‖ π_ref) from the log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL divergence" (2020). Let y = log π_ref − log π_θ for a token
sampled from π_θ. The mean of each estimator is the KL (for k2, to second order); the estimators
differ in variance and sign.

Far from y = 0, k2 and k3 continue as straight lines. Clipping them would remove the gradient where
the KL is largest, but without a limit, a single token could dominate a batch. To add an estimator,
write a function of y and add a line to ESTIMATORS.
"""

import math
from collections.abc import Callable

import mlx.core as mx

from grpo_fn.checks import LOG_RATIO_LIMIT, check_choice

K3_LINEAR_FROM = math.log(1e4)  # y = 9.21, where its derivative is 1e4 − 1
LIMIT = 1e6  # nats: a log-probability of −inf counts as this, so that the estimate is a number


def k1(y: mx.array) -> mx.array:
    """Returns −y, which is unbiased, and positive or negative."""
    return -y


def k2(y: mx.array) -> mx.array:
    """Returns y²/2, which is never negative and biased in the third order. Its gradient is the
    gradient of KL(π_θ ‖ π_ref).

    Beyond |y| = 20, the estimator continues as its tangent, 20·|y| − 200.
    """
    near = mx.clip(y, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return near * (y - near / 2)


def k3(y: mx.array) -> mx.array:
    """Returns exp(y) − y − 1, which is unbiased and never negative.

    Beyond y = ln 1e4, the estimator continues as its tangent: e^y becomes 1e4·(1 + y − ln 1e4).
    """
    near = mx.minimum(y, K3_LINEAR_FROM)
    return mx.exp(near) * (1 + (y - near)) - y - 1


ESTIMATORS: dict[str, Callable[[mx.array], mx.array]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(kind: str, logp: mx.array, ref_logp: mx.array) -> mx.array:
    """Estimates KL(π_θ ‖ π_ref) at each token.

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
    return ESTIMATORS[kind](mx.clip(ref_logp - logp, -LIMIT, LIMIT))
