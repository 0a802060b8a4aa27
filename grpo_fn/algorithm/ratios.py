"""Computes importance ratios: the learner's π_θ/π_old, and π_old/μ between learner and sampler.

A correction for a sampler μ that differs from π_old is a weight for each token's policy term. A
correction's function accepts π_old/μ for tokens, [B,T], and for sequences, [B,1]; the LossSpec
fields that the function needs are keywords. The function returns the weight [B,T]. To add a
correction, write the function and add a line to CORRECTIONS.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from grpo_fn.checks import clamp_log

LEVELS = ("token", "sequence")
SEQUENCE_RATIOS = ("geometric", "product")


def policy_ratio(
    logp_bt: mx.array, old_logp_bt: mx.array, mask_bt: mx.array, level: str
) -> mx.array:
    """Computes r = π_θ/π_old at each token, float32 [B,T].

    `token`: r_t. `sequence`: s = exp(mean_t log r_t), the same at every token of a row (GSPO, arXiv
    2507.18071, eq. 7). The product over a row, without the mean, is not supported, because it
    exceeds float32 after a few dozen tokens.

    The three arguments are [B,T] arrays; masked positions must contain finite numbers.
    """
    log_ratio = logp_bt - old_logp_bt
    if level == "sequence":
        log_ratio = mx.broadcast_to(sequence_mean(log_ratio, mask_bt), log_ratio.shape)
    return mx.exp(clamp_log(log_ratio))


def sequence_sum(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Returns the sum over each row's unmasked tokens, [B,1]."""
    return (values_bt * mask_bt).sum(axis=1, keepdims=True)


def sequence_mean(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Returns the mean over each row's unmasked tokens, [B,1], or 0 for a fully masked row."""
    length = mx.maximum(mask_bt.sum(axis=1, keepdims=True), 1)
    return sequence_sum(values_bt, mask_bt) / length


class RolloutMismatch(NamedTuple):
    """The difference between μ and π_old at the sampled tokens, without a gradient."""

    log_ratio_bt: mx.array  # d = log π_old − log μ, clamped to ±20
    ratio_bt: mx.array  # exp d
    sequence_ratio_b1: mx.array  # each row's q


def rollout_mismatch(
    old_logp_bt: mx.array, rollout_logp_bt: mx.array, mask_bt: mx.array, sequence_ratio: str
) -> RolloutMismatch:
    """Computes π_old/μ = exp d for each token, and a ratio q for each sequence: exp(mean of d)
    (`geometric`) or exp(Σ d) (`product`).

    All array arguments are float32 [B,T] and finite at masked positions.
    """
    d_bt = mx.stop_gradient(clamp_log(old_logp_bt - rollout_logp_bt))
    log_q_b1 = (sequence_sum if sequence_ratio == "product" else sequence_mean)(d_bt, mask_bt)
    return RolloutMismatch(d_bt, mx.exp(d_bt), mx.exp(clamp_log(log_q_b1)))


def unweighted(ratio_bt: mx.array, q_b1: mx.array) -> mx.array:
    """Returns 1."""
    return mx.ones_like(ratio_bt)


def token_truncate(
    ratio_bt: mx.array, q_b1: mx.array, *, correction_floor: float, correction_cap: float
) -> mx.array:
    """Returns exp d, clipped to the range from floor to cap (FlashRL; TRL)."""
    return mx.clip(ratio_bt, correction_floor, correction_cap)


def token_mask(
    ratio_bt: mx.array, q_b1: mx.array, *, correction_range: tuple[float, float]
) -> mx.array:
    """Returns exp d inside the range, and 0 outside (IcePop; TRL)."""
    low, high = correction_range
    return mx.where((ratio_bt >= low) & (ratio_bt <= high), ratio_bt, 0.0)


def sequence_truncate(
    ratio_bt: mx.array, q_b1: mx.array, *, correction_floor: float, correction_cap: float
) -> mx.array:
    """Returns q at every token, clipped to the range from floor to cap (TRL, which uses the
    product).
    """
    return mx.broadcast_to(mx.clip(q_b1, correction_floor, correction_cap), ratio_bt.shape)


def sequence_weight(ratio_bt: mx.array, q_b1: mx.array) -> mx.array:
    """Returns q at every token."""
    return mx.broadcast_to(q_b1, ratio_bt.shape)


class Correction(NamedTuple):
    """A correction and its properties."""

    function: Callable[..., mx.array]  # (ratio_bt, q_b1, **fields) -> weight_bt
    fields: tuple[str, ...] = ()  # of LossSpec, which the function takes as keywords
    by_sequence: bool = False  # whether the function uses q


CORRECTIONS: dict[str, Correction] = {
    "none": Correction(unweighted),
    "token_truncate": Correction(token_truncate, ("correction_floor", "correction_cap")),
    "token_mask": Correction(token_mask, ("correction_range",)),
    "sequence_truncate": Correction(
        sequence_truncate, ("correction_floor", "correction_cap"), True
    ),
    # These two need a `sequence_range`. With the product, the second is TRL's `sequence_mask`.
    "sequence_mask": Correction(unweighted),
    "sequence_mask_weighted": Correction(sequence_weight, by_sequence=True),
}


def drop_sequences(
    weight_bt: mx.array, q_b1: mx.array, sequence_range: tuple[float, float]
) -> mx.array:
    """Sets the weight to 0 in each row whose q is outside the range."""
    low, high = sequence_range
    return mx.where((q_b1 >= low) & (q_b1 <= high), weight_bt, 0.0)
