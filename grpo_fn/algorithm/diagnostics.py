"""LossStats, the diagnostics of a loss, and a function that merges those of several parts of a
batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from grpo_fn.algorithm.ratios import RolloutMismatch
from grpo_fn.algorithm.spec import LossSpec, divided, divisor
from grpo_fn.algorithm.surrogates import SURROGATES

_SUMMED = ("denominator", "num_tokens", "num_sequences", "num_ratios")


class LossStats(NamedTuple):
    """Diagnostics of one loss, 0-d float32 each. All diagnostics are 0 if all tokens are masked."""

    loss: mx.array  # the loss: Σ / denominator
    # the divisor: sequences, tokens or sequences × L_max; 0 if the aggregation is `sum`
    denominator: mx.array
    num_tokens: mx.array  # unmasked tokens that the learner saw: the weight of the means below
    num_sequences: mx.array  # rows with an unmasked token
    kl: mx.array  # mean estimate of KL(π_θ ‖ π_ref), nats, before any bias correction
    entropy: mx.array  # mean entropy of π_θ, nats
    # mean KL(π_θ ‖ teacher), nats: exact, or estimated from the sampled tokens
    teacher_kl: mx.array
    # the total of the next three shares: tokens, or sequences at level `sequence`
    num_ratios: mx.array
    # share with r < 1−ε_low and A < 0; 0 where the surrogate does not clip there
    clip_low: mx.array
    clip_high: mx.array  # share with r > 1+ε_high and A > 0; 0 where there is no clip
    clip_region: mx.array  # clip_low + clip_high
    ratio_mean: mx.array  # r = π_θ/π_old of the spec's level
    ratio_min: mx.array
    ratio_max: mx.array
    # |log π_old − log μ|, nats: sampler against learner, before any masking
    logp_diff_mean: mx.array
    logp_diff_max: mx.array
    is_ratio_mean: mx.array  # π_old/μ at each token, before any masking
    is_ratio_min: mx.array
    is_ratio_max: mx.array
    is_ratio_sq_mean: mx.array
    sampling_kl_k1: mx.array  # estimates of KL(μ ‖ π_old), nats
    sampling_kl_k3: mx.array
    masked_fraction: mx.array  # share of tokens that the correction masked

    @property
    def ess(self) -> mx.array:
        """Effective sample size divided by the number of tokens, (Σw)²/(nΣw²); it is 1 if μ =
        π_old."""
        return mx.square(self.is_ratio_mean) / mx.maximum(self.is_ratio_sq_mean, 1e-30)


class LossInputs(NamedTuple):
    """The input arrays of a loss, after defaults are filled in: float32, 0 at masked positions.

    Only log π_θ, the entropy and the teacher's KL carry a gradient.
    """

    logp_bt: mx.array
    adv: mx.array  # [B,1], 0 for a fully masked row; or [B,T]
    mask_bt: mx.array
    old_logp_bt: mx.array
    rollout_logp_bt: mx.array
    ref_logp_bt: mx.array | None
    entropy_bt: mx.array
    teacher_kl_bt: mx.array | None
    keep_bt: mx.array | None  # bool
    num_sequences: mx.array
    num_tokens: mx.array


def loss_stats(
    x: LossInputs,
    spec: LossSpec,
    ratio_bt: mx.array,
    kl_bt: mx.array,
    mismatch: RolloutMismatch,
    weight_bt: mx.array,
    inside_bt: mx.array | None,
    total: mx.array,
    denominator: mx.array,
) -> LossStats:
    """Computes the diagnostics of the loss `total / denominator`, without a gradient. The inputs
    are the ratios r, the KL before any bias correction, the correction's weights, and the mask of
    tokens inside the surrogate's trust region, if it has one.
    """
    mask_bt = x.mask_bt
    by_sequence = spec.level == "sequence"  # one ratio per row
    counted_bt = mask_bt > 0
    length_b = mask_bt.sum(axis=1)
    seen = length_b.sum()
    rows = (length_b > 0).astype(mx.float32).sum()
    num_ratios = rows if by_sequence else seen

    def mean(values_bt: mx.array) -> mx.array:
        return (values_bt * mask_bt).sum() / mx.maximum(seen, 1)

    def share(clipped_bt: mx.array) -> mx.array:
        # At masked positions, the ratio is 1, or the row's ratio.
        clipped = clipped_bt.any(axis=1) if by_sequence else clipped_bt
        return clipped.sum() / mx.maximum(num_ratios, 1)

    def least(values_bt: mx.array) -> mx.array:
        return mx.where(seen > 0, mx.where(counted_bt, values_bt, mx.inf).min(), 0.0)

    def most(values_bt: mx.array) -> mx.array:
        return mx.where(seen > 0, mx.where(counted_bt, values_bt, -mx.inf).max(), 0.0)

    low, high = 1 - spec.epsilon_low, 1 + spec.upper_epsilon
    sides = SURROGATES[spec.surrogate].clipped_sides
    below_bt = ratio_bt < low if inside_bt is None else ~inside_bt
    above_bt = ratio_bt > high if inside_bt is None else ~inside_bt
    low_bt = below_bt & (x.adv < 0) & ("low" in sides)
    high_bt = above_bt & (x.adv > 0) & ("high" in sides)
    difference_bt = x.old_logp_bt - x.rollout_logp_bt
    d_bt, is_ratio_bt = mismatch.log_ratio_bt, mismatch.ratio_bt
    stats = LossStats(
        loss=divided(total, denominator),
        denominator=denominator,
        num_tokens=seen,
        num_sequences=rows,
        kl=mean(kl_bt),
        entropy=mean(x.entropy_bt),
        # Not the mean of zeros: MLX cannot compile a function with two outputs that are the same
        # expression.
        teacher_kl=0 * seen if x.teacher_kl_bt is None else mean(x.teacher_kl_bt),
        num_ratios=num_ratios,
        clip_low=share(low_bt),
        clip_high=share(high_bt),
        clip_region=share(low_bt | high_bt),
        ratio_mean=mean(ratio_bt),
        ratio_min=least(ratio_bt),
        ratio_max=most(ratio_bt),
        logp_diff_mean=mean(mx.abs(difference_bt)),
        logp_diff_max=most(mx.abs(difference_bt)),
        is_ratio_mean=mean(is_ratio_bt),
        is_ratio_min=least(is_ratio_bt),
        is_ratio_max=most(is_ratio_bt),
        is_ratio_sq_mean=mean(mx.square(is_ratio_bt)),
        sampling_kl_k1=mean(-d_bt),
        sampling_kl_k3=mean(mx.exp(d_bt) - d_bt - 1),
        masked_fraction=mean(weight_bt == 0),
    )
    return LossStats._make(mx.stop_gradient(value) for value in stats)


def empty_stats(denominator: mx.array) -> LossStats:
    """Returns the stats for a batch without rows for the learner: the batch's denominator, and 0
    for everything else.
    """
    zeros = LossStats._make([mx.array(0.0)] * len(LossStats._fields))
    return zeros._replace(denominator=denominator)


def merge_stats(parts: Sequence[LossStats]) -> LossStats:
    """Combines the stats of a batch's parts into the whole batch's stats."""
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: mx.stack([getattr(part, name) for part in parts]) for name in LossStats._fields
    }
    tokens, denominator = columns["num_tokens"], columns["denominator"]
    present = tokens > 0
    merged = []  # in field order
    for name, column in columns.items():
        if name in _SUMMED:
            merged.append(column.sum())
        elif name == "loss":
            total = (column * divisor(denominator)).sum()
            merged.append(divided(total, denominator.sum()))
        elif name.endswith(("_min", "_max")):
            least = name.endswith("_min")
            worst = mx.where(present, column, mx.inf if least else -mx.inf)
            extreme = worst.min() if least else worst.max()
            merged.append(mx.where(present.any(), extreme, 0.0))
        elif name.startswith("clip_"):
            ratios = columns["num_ratios"]
            merged.append((column * ratios).sum() / mx.maximum(ratios.sum(), 1))
        else:
            merged.append((column * tokens).sum() / mx.maximum(tokens.sum(), 1))
    return LossStats._make(merged)
