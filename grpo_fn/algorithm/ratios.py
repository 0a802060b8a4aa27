"""Importance ratios: the learner against itself (levels), and against what sampled (corrections)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from grpo_fn.backends.cpu.elementwise import exp
from grpo_fn.checks import clamp_log

if TYPE_CHECKING:
    from grpo_fn.algorithm.spec import LossSpec

LEVELS = ("token", "sequence")
CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_mask_weighted",
)
SEQUENCE_RATIOS = ("geometric", "product")


def sequence_sum(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Sum over each row's counted tokens, [B,1]."""
    return (values_bt * mask_bt).sum(axis=1, keepdims=True)


def sequence_mean(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Mean over each row's counted tokens, [B,1]; 0 for a row that has none."""
    length = mx.maximum(mask_bt.sum(axis=1, keepdims=True), 1)
    return sequence_sum(values_bt, mask_bt) / length


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

    With q = exp(mean of d) of a row (`sequence_ratio` "geometric") or exp(Σ d) ("product"), the weight is

        token_truncate           exp d between `correction_floor` and `correction_cap` (FlashRL; TRL)
        token_mask               exp d inside `correction_range`, else 0 (IcePop; TRL)
        sequence_truncate        q between floor and cap, at every token (TRL, with the product)
        sequence_mask            1
        sequence_mask_weighted   q (TRL's `sequence_mask`, with the product)

    and, with a `sequence_range`, 0 for a row whose q leaves it. All arrays are float32 [B,T], finite at
    masked positions; no gradient flows.
    """
    d_bt = mx.stop_gradient(clamp_log(old_logp_bt - rollout_logp_bt))
    ratio_bt = exp(d_bt)
    log_q_b1 = (sequence_sum if spec.sequence_ratio == "product" else sequence_mean)(d_bt, mask_bt)
    q_b1 = exp(clamp_log(log_q_b1))
    weight_bt = mx.ones_like(ratio_bt)
    if spec.correction == "token_truncate":
        weight_bt = mx.clip(ratio_bt, spec.correction_floor, spec.correction_cap)
    elif spec.correction == "token_mask":
        low, high = spec.correction_range
        weight_bt = mx.where((ratio_bt >= low) & (ratio_bt <= high), ratio_bt, 0.0)
    elif spec.correction == "sequence_truncate":
        weight_bt = weight_bt * mx.clip(q_b1, spec.correction_floor, spec.correction_cap)
    elif spec.correction == "sequence_mask_weighted":
        weight_bt = weight_bt * q_b1
    if spec.sequence_range is not None:
        low, high = spec.sequence_range
        weight_bt = mx.where((q_b1 >= low) & (q_b1 <= high), weight_bt, 0.0)
    return RolloutMismatch(d_bt, ratio_bt, weight_bt)
