"""Surrogate objectives ℓ for one token, which are minimised instead of −E[A].

Each function accepts the ratio r at the spec's level, the advantage A and log π_θ of the token,
broadcast to one shape; the required LossSpec fields and arrays are keywords. The function returns
ℓ; gradients flow through r and log π_θ. A trust region may set ℓ to 0. To add a surrogate, write
the function and add a line to SURROGATES.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from grpo_fn.algorithm.ratios import LEVELS, sequence_mean, sequence_sum
from grpo_fn.checks import LOG_RATIO_LIMIT


def clip(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
) -> mx.array:
    """Computes ℓ = −min( min(r, δ)·A, clip(r, 1−ε_low, 1+ε_high)·A ).

    PPO (arXiv 1707.06347, eq. 7), with DAPO's separate ε_high (2503.14476) and, if `delta` is set,
    the two-sided bound δ that keeps r·A finite for A < 0 (INTELLECT-2, 2505.07291, eq. 2).
    """
    bounded = ratio if delta is None else mx.minimum(ratio, delta)
    clipped = mx.clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
    return -mx.minimum(bounded * advantage, clipped * advantage)


def dual_clip(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
    dual_clip: float,
) -> mx.array:
    """Computes `clip`, but at most −c·A if A < 0 (arXiv 1912.09729, eq. 5)."""
    loss = clip(
        ratio, advantage, logp, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta
    )
    return mx.where(advantage < 0, mx.minimum(loss, -dual_clip * advantage), loss)


def cispo(ratio: mx.array, advantage: mx.array, logp: mx.array, *, epsilon_high: float) -> mx.array:
    """Computes ℓ = −sg(min(r, 1+ε_high))·A·log π_θ (MiniMax-M1, arXiv 2506.13585, eq. 4–5).

    As in the paper, the cap is 1 + ε_high; TRL's `epsilon_high` is the cap itself.
    """
    weight = mx.stop_gradient(mx.minimum(ratio, 1 + epsilon_high))
    return -weight * advantage * logp


def sapo(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    sapo_tau_pos: float,
    sapo_tau_neg: float,
) -> mx.array:
    """Computes ℓ = −(4/τ)·σ(τ(r−1))·A, where τ depends on the sign of A (arXiv 2511.20347). The
    soft gate replaces the clip.
    """
    tau = mx.where(advantage > 0, sapo_tau_pos, sapo_tau_neg)
    return -(4 / tau) * mx.sigmoid(tau * (ratio - 1)) * advantage


def plain(ratio: mx.array, advantage: mx.array, logp: mx.array) -> mx.array:
    """Computes ℓ = −exp(log π_θ − sg(log π_θ))·A, the plain policy gradient, which is independent
    of π_old.
    """
    return -mx.exp(logp - mx.stop_gradient(logp)) * advantage


def likelihood(ratio: mx.array, advantage: mx.array, logp: mx.array) -> mx.array:
    """Computes ℓ = −A·log π_θ, which has the same gradient as `plain`. With A = 1, ℓ is the
    cross-entropy.
    """
    return -advantage * logp


def importance(ratio: mx.array, advantage: mx.array, logp: mx.array) -> mx.array:
    """Computes ℓ = −r·A, the importance-weighted policy gradient."""
    return -ratio * advantage


def truncated(
    ratio: mx.array, advantage: mx.array, logp: mx.array, *, ratio_cap: float
) -> mx.array:
    """Computes ℓ = −sg(min(r, C))·A·log π_θ, with DPPO's truncated weight (arXiv 2602.04879,
    section 5.4).
    """
    return -mx.stop_gradient(mx.minimum(ratio, ratio_cap)) * advantage * logp


def dro(
    ratio: mx.array, advantage: mx.array, logp: mx.array, *, old_logp_bt: mx.array, dro_beta: float
) -> mx.array:
    """Computes ℓ = −(A·log π_θ − β/2·(log π_θ − log π_old)²), direct reward optimisation (arXiv
    2405.19107).
    """
    return 0.5 * dro_beta * mx.square(logp - old_logp_bt) - advantage * logp


def geo_mean(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    old_logp_bt: mx.array,
    mask_bt: mx.array,
    epsilon_low: float,
    epsilon_high: float,
) -> mx.array:
    """Computes ℓ = −Ā·exp(mean_t s·min(s·x, s·clip(x, −ε_low, ε_high))), which is the same at every
    token of a row.

    x = log π_θ − log π_old and s = sign A. This is GMPO (arXiv 2507.20673, eq. 4), which clips each
    token in log space. Ā is the row's mean advantage.
    """
    sign = mx.sign(advantage)
    x_bt = logp - old_logp_bt
    clipped_bt = mx.clip(x_bt, -epsilon_low, epsilon_high)
    log_ratio_b1 = sequence_mean(sign * mx.minimum(sign * x_bt, sign * clipped_bt), mask_bt)
    advantage_b1 = sequence_mean(mx.broadcast_to(advantage, logp.shape), mask_bt)
    return mx.broadcast_to(-advantage_b1 * mx.exp(log_ratio_b1), logp.shape)


def vespo(
    ratio: mx.array,
    advantage: mx.array,
    logp: mx.array,
    *,
    mask_bt: mx.array,
    weight_bt: mx.array,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> mx.array:
    """Computes ℓ = −sg(φ(w))·A·log π_θ, where φ(w) = exp(λ + k·log w − λ·w) (VESPO, as in TRL
    1.16).

    w is the product of r_t·(the correction's weight) over the row; log w is limited to the range
    from log 1e-8 to 20. k and λ depend on the sign of A.
    """
    lowest = math.log(1e-8)
    log_weight_bt = mx.clip(mx.log(weight_bt), lowest, LOG_RATIO_LIMIT)
    log_w_b1 = sequence_sum(mx.log(ratio) + log_weight_bt, mask_bt)
    log_w_b1 = mx.stop_gradient(mx.clip(log_w_b1, lowest, LOG_RATIO_LIMIT))
    k = mx.where(advantage >= 0, vespo_k_pos, vespo_k_neg)
    rate = mx.where(advantage >= 0, vespo_lambda_pos, vespo_lambda_neg)
    phi = mx.exp(rate + k * log_w_b1 - rate * mx.exp(log_w_b1))
    return -phi * advantage * logp


def inside_tv(
    logp_bt: mx.array, old_logp_bt: mx.array, advantage: mx.array, low: float, high: float
) -> mx.array:
    """Returns whether π − π_old ≤ high (A > 0) or ≥ −low (otherwise): DPPO's binary total variation
    (arXiv 2602.04879).
    """
    apart_bt = mx.exp(logp_bt) - mx.exp(old_logp_bt)
    return mx.where(advantage > 0, apart_bt <= high, apart_bt >= -low)


def inside_kl(
    logp_bt: mx.array, old_logp_bt: mx.array, advantage: mx.array, low: float, high: float
) -> mx.array:
    """Returns True where DPPO's binary KL is at most `high` (A > 0) or `low` (otherwise), or where
    π has moved against the sign of A.
    """
    p_bt = mx.exp(logp_bt)
    old_bt = mx.exp(old_logp_bt)
    others_bt = mx.log((1 - old_bt + 1e-8) / (1 - p_bt + 1e-8))
    kl_bt = old_bt * (old_logp_bt - logp_bt) + (1 - old_bt) * others_bt
    raised_bt = (kl_bt <= high) | (p_bt <= old_bt)
    lowered_bt = (kl_bt <= low) | (p_bt >= old_bt)
    return mx.where(advantage > 0, raised_bt, lowered_bt)


def inside_band(
    logp_bt: mx.array, old_logp_bt: mx.array, advantage: mx.array, low: float, high: float
) -> mx.array:
    """Returns whether −low ≤ π − μ ≤ high, for either sign of A: IPO, which is prime-rl's default,
    with 0.3 on both sides.
    """
    apart_bt = mx.exp(logp_bt) - mx.exp(old_logp_bt)
    return (apart_bt <= high) & (apart_bt >= -low)


class Surrogate(NamedTuple):
    """A surrogate and its properties."""

    function: Callable[..., mx.array]  # (ratio, advantage, logp, **fields, **arrays) -> ℓ
    fields: tuple[str, ...] = ()  # of LossSpec, which the function takes as keywords
    # "low", "high": the sides on which it clips the ratio; the log reports the shares
    clipped_sides: tuple[str, ...] = ()
    # those of old_logp_bt, mask_bt and weight_bt that the function takes as keywords; if it takes
    # the correction's weights, ℓ is not multiplied by them
    arrays: tuple[str, ...] = ()
    # (logp, old_logp, advantage, ε_low, ε_high) -> whether the token's ℓ counts; None: always
    region: Callable[..., mx.array] | None = None
    by_sampler: bool = False  # r and the region use μ in place of π_old
    levels: tuple[str, ...] = LEVELS


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(clip, ("epsilon_low", "epsilon_high", "delta"), ("low", "high")),
    "dual_clip": Surrogate(
        dual_clip, ("epsilon_low", "epsilon_high", "delta", "dual_clip"), ("low", "high")
    ),
    "cispo": Surrogate(cispo, ("epsilon_high",), ("high",)),
    "sapo": Surrogate(sapo, ("sapo_tau_pos", "sapo_tau_neg")),
    "dppo_tv": Surrogate(
        truncated, ("ratio_cap",), ("low", "high"), region=inside_tv, levels=("token",)
    ),
    "dppo_kl": Surrogate(
        truncated, ("ratio_cap",), ("low", "high"), region=inside_kl, levels=("token",)
    ),
    "ipo": Surrogate(
        importance, (), ("low", "high"), region=inside_band, by_sampler=True, levels=("token",)
    ),
    "geo_mean": Surrogate(
        geo_mean,
        ("epsilon_low", "epsilon_high"),
        arrays=("old_logp_bt", "mask_bt"),
        levels=("token",),
    ),
    "vespo": Surrogate(
        vespo,
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        arrays=("mask_bt", "weight_bt"),
        levels=("token",),
    ),
    "dro": Surrogate(dro, ("dro_beta",), arrays=("old_logp_bt",), levels=("token",)),
    "none": Surrogate(plain, levels=("token",)),
    "likelihood": Surrogate(likelihood, levels=("token",)),
}
