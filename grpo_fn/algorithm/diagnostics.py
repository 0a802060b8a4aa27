"""LossStats: the diagnostics of a loss, and how those of a batch's parts add up."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

_SUMMED = ("denominator", "num_tokens", "num_sequences", "num_ratios")


class LossStats(NamedTuple):
    """Diagnostics of one loss: 0-d float32 each, 0 where no token counts."""

    loss: mx.array  # the loss: Σ / denominator
    denominator: mx.array  # what the sum was divided by: sequences, tokens or sequences × L_max
    num_tokens: mx.array  # counted tokens that the learner saw: the weight of the means below
    num_sequences: mx.array  # rows with a counted token
    kl: mx.array  # mean estimate of KL(π_θ ‖ π_ref), nats, before any bias correction
    entropy: mx.array  # mean entropy of π_θ, nats
    num_ratios: mx.array  # what the next three are shares of: the tokens, at level `sequence` the sequences
    clip_low: mx.array  # share with r < 1−ε_low and A < 0; 0 where the surrogate does not clip there
    clip_high: mx.array  # share with r > 1+ε_high and A > 0; the same
    clip_region: mx.array  # the two together
    ratio_mean: mx.array  # r = π_θ/π_old of the spec's level
    ratio_min: mx.array
    ratio_max: mx.array
    logp_diff_mean: mx.array  # |log π_old − log μ|, nats: sampler against learner, before any masking
    logp_diff_max: mx.array
    is_ratio_mean: mx.array  # π_old/μ at each token, before any masking
    is_ratio_min: mx.array
    is_ratio_max: mx.array
    is_ratio_sq_mean: mx.array
    sampling_kl_k1: mx.array  # estimates of KL(μ ‖ π_old), nats
    sampling_kl_k3: mx.array
    masked_fraction: mx.array  # share of tokens that the correction dropped

    @property
    def ess(self) -> mx.array:
        """Effective sample size over the number of tokens, (Σw)²/(nΣw²): 1 where μ = π_old."""
        return mx.square(self.is_ratio_mean) / mx.maximum(self.is_ratio_sq_mean, 1e-30)


def merge_stats(parts: Sequence[LossStats]) -> LossStats:
    """Combine the stats of a batch's parts into those of the whole."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: mx.stack([getattr(part, name) for part in parts]) for name in LossStats._fields}
    tokens, denominator = columns["num_tokens"], columns["denominator"]
    present = tokens > 0
    merged = {}
    for name, column in columns.items():
        if name in _SUMMED:
            merged[name] = column.sum()
        elif name == "loss":
            merged[name] = (column * denominator).sum() / mx.maximum(denominator.sum(), 1e-30)
        elif name.endswith(("_min", "_max")):
            least = name.endswith("_min")
            worst = mx.where(present, column, mx.inf if least else -mx.inf)
            extreme = worst.min() if least else worst.max()
            merged[name] = mx.where(present.any(), extreme, 0.0)
        elif name.startswith("clip_"):
            ratios = columns["num_ratios"]
            merged[name] = (column * ratios).sum() / mx.maximum(ratios.sum(), 1)
        else:
            merged[name] = (column * tokens).sum() / mx.maximum(tokens.sum(), 1)
    return LossStats(**merged)
