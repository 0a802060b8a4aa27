"""Importance ratios of the learner against itself: r = π_θ/π_old, of a token or of its sequence."""

import mlx.core as mx

from grpo_fn.checks import clamp_log

LEVELS = ("token", "sequence")


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
    return mx.exp(clamp_log(log_ratio))


def sequence_sum(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Sum over each row's counted tokens, [B,1]."""
    return (values_bt * mask_bt).sum(axis=1, keepdims=True)


def sequence_mean(values_bt: mx.array, mask_bt: mx.array) -> mx.array:
    """Mean over each row's counted tokens, [B,1]; 0 for a row that has none."""
    length = mx.maximum(mask_bt.sum(axis=1, keepdims=True), 1)
    return sequence_sum(values_bt, mask_bt) / length
