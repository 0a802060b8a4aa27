"""Importance ratios: the learner against itself (levels), and against what sampled (corrections)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from grpo_fn.elementwise import exp
from grpo_fn.guards import clamp_log

if TYPE_CHECKING:
    from grpo_fn.specs import LossSpec

LEVELS = ("token", "sequence")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_mask")


def sequence_mean(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Mean over each row's counted tokens, [B,1]; 0 for a row that has none."""
    length = mx.maximum(mask_bt.sum(axis=1, keepdims=True), 1)
    return (values_bt * mask_bt).sum(axis=1, keepdims=True) / length


def policy_ratio(logp_bt: mx.array, old_logp_bt: mx.array, mask_bt: mx.array, level: str) -> mx.array:
    """r = π_θ/π_old at each token, float32 [B,T].

    `token`: r_t. `sequence`: s = exp(mean_t log r_t), the same at every token of a row (GSPO, arXiv
    2507.18071, eq. 7). The product over a row, without the mean, is not offered: it leaves float32's range
    after a few dozen tokens.

    All three arrays are [B,T]; masked positions must hold finite numbers.
    """
    log_ratio = logp_bt - old_logp_bt
    if level == "sequence":
        log_ratio = mx.broadcast_to(sequence_mean(log_ratio, mask_bt), log_ratio.shape)
    return exp(clamp_log(log_ratio))


class RolloutMismatch(NamedTuple):
    """How far the sampler's distribution μ is from the learner's π_old at the sampled tokens."""

    log_ratio_bt: mx.array  # d = log π_old − log μ, clamped to ±20
    ratio_bt: mx.array  # exp d
    weight_bt: mx.array  # the correction's weight, no gradient


def rollout_correction(
    old_logp_bt: mx.array, rollout_logp_bt: mx.array, mask_bt: mx.array, spec: LossSpec
) -> RolloutMismatch:
    """Weights that correct for sampling from μ ≠ π_old.

    `token_truncate` is truncated importance sampling (FlashRL), `token_mask` IcePop's masked form,
    `sequence_mask` drops a row whose geometric mean ratio leaves `sequence_range`; a `sequence_range`
    beside a token form applies both. All arrays are float32 [B,T], finite at masked positions; no gradient
    flows.
    """
    d_bt = mx.stop_gradient(clamp_log(old_logp_bt - rollout_logp_bt))
    ratio_bt = exp(d_bt)
    weight_bt = mx.ones_like(ratio_bt)
    if spec.correction == "token_truncate":
        weight_bt = mx.minimum(ratio_bt, spec.correction_cap)
    elif spec.correction == "token_mask":
        low, high = spec.correction_range
        weight_bt = mx.where((ratio_bt >= low) & (ratio_bt <= high), ratio_bt, 0.0)
    if spec.sequence_range is not None:
        low, high = spec.sequence_range
        mean_ratio_b1 = exp(clamp_log(sequence_mean(d_bt, mask_bt)))
        weight_bt = mx.where((mean_ratio_b1 >= low) & (mean_ratio_b1 <= high), weight_bt, 0.0)
    return RolloutMismatch(d_bt, ratio_bt, weight_bt)
