"""policy_loss evaluates the loss that a LossSpec describes, and returns its diagnostics.

    l = w·ℓ + β·KL − c·H        loss = Σ weighted l / denominator

Everything is float32. At masked positions, every input is replaced by zero before any arithmetic,
so values there (including NaN and inf) do not affect the loss or the gradient. An unmasked log-prob
of −∞ becomes −10,000, without a gradient, so that the difference of two such log-probs is 0 instead
of NaN.
"""

from typing import NamedTuple

import mlx.core as mx

from grpo_fn.algorithm.diagnostics import LossInputs, LossStats, empty_stats, loss_stats
from grpo_fn.algorithm.kl import kl_estimate
from grpo_fn.algorithm.ratios import CORRECTIONS, drop_sequences, policy_ratio, rollout_mismatch
from grpo_fn.algorithm.spec import AGGREGATIONS, LossSpec, check_max_length, divided
from grpo_fn.algorithm.surrogates import SURROGATES
from grpo_fn.checks import check_rank, check_shape

LOWEST = -1e4  # lowest log-prob


class LossArrays(NamedTuple):
    """The arrays for `policy_loss`, and two counts that include the rows omitted from the batch."""

    logp_bt: mx.array
    adv_b: mx.array  # [B] or [B,T]
    mask_bt: mx.array
    old_logp_bt: mx.array | None = None
    rollout_logp_bt: mx.array | None = None
    ref_logp_bt: mx.array | None = None
    entropy_bt: mx.array | None = None
    keep_bt: mx.array | None = None
    teacher_kl_bt: mx.array | None = None
    num_sequences: mx.array | None = None  # for the denominator, 0-d; None means the number of rows
    num_tokens: mx.array | None = None  # the same; None means the unmasked tokens


def policy_loss(
    logp_bt: mx.array,
    adv_b: mx.array,
    mask_bt: mx.array,
    spec: LossSpec,
    *,
    old_logp_bt: mx.array | None = None,
    rollout_logp_bt: mx.array | None = None,
    ref_logp_bt: mx.array | None = None,
    max_completion_length: int | None = None,
    entropy_bt: mx.array | None = None,
    keep_bt: mx.array | None = None,
    teacher_kl_bt: mx.array | None = None,
    teacher_coef: float = 0.0,
) -> tuple[mx.array, LossStats]:
    """Computes the loss of a batch, which is to be minimised, and its diagnostics.

    Args:
        logp_bt: log π_θ of the sampled tokens at the sampling temperature, [B,T], nats;
            differentiable.
        adv_b: advantage of each completion, [B], or of each token, [B,T]. With level `sequence` and
            [B,T] the policy term is GSPO-token's (arXiv 2507.18071, eq. 13–14): it has the value of
            the sequence's ratio and the gradient of the token's ratio.
        mask_bt: 1 (or True) for tokens that count, [B,T].
        spec: the algorithm.
        old_logp_bt: log π_old, [B,T]; if it is None, π_old is π_θ itself and `sg(logp_bt)` is used.
        rollout_logp_bt: log μ from the sampler, [B,T]; required by a correction, otherwise only
            logged.
        ref_logp_bt: log π_ref, [B,T]; required if `spec.beta` > 0.
        max_completion_length: L_max, tokens; required by the aggregation `constant`.
        entropy_bt: entropy of π_θ at each position, [B,T], nats; required if `spec.entropy_coef` >
            0.
        keep_bt: 0/1, [B,T]: tokens whose policy term counts (top-entropy masking); KL and
            denominators use all tokens.
        teacher_kl_bt: KL(π_θ ‖ teacher) at each position, [B,T], nats: `reverse_kl`,
            differentiable, or an estimate that is only logged.
        teacher_coef: the coefficient of the teacher's KL in the loss.

    Returns:
        (loss, stats), float32; if no token counts, the loss and its gradient are 0.

    Raises:
        ValueError: a shape is wrong, or an array that the spec requires is missing.
    """
    arrays = LossArrays(
        logp_bt,
        adv_b,
        mask_bt,
        old_logp_bt,
        rollout_logp_bt,
        ref_logp_bt,
        entropy_bt,
        keep_bt,
        teacher_kl_bt,
    )
    total, stats = loss_sum(arrays, spec, max_completion_length, teacher_coef)
    return divided(total, stats.denominator), stats


def loss_sum(
    arrays: LossArrays,
    spec: LossSpec,
    max_completion_length: int | None = None,
    teacher_coef: float = 0.0,
) -> tuple[mx.array, LossStats]:
    """Returns the sum from `policy_loss` before it is divided; the stats contain the denominator.

    The learner accumulates both and divides once, so any split of a batch results in the same step.
    """
    _check(arrays, spec, max_completion_length, teacher_coef)
    x = _cleaned(arrays)
    mask_bt, adv = x.mask_bt, x.adv  # [B,1] or [B,T]
    aggregation = AGGREGATIONS[spec.aggregation]
    denominator = aggregation.denominator(x.num_sequences, x.num_tokens, max_completion_length)
    if not mask_bt.size:
        return mx.array(0.0), empty_stats(denominator)

    ratio_bt = policy_ratio(x.logp_bt, x.old_logp_bt, mask_bt, spec.level)  # r = π_θ/π_old
    # π_old/μ
    mismatch = rollout_mismatch(x.old_logp_bt, x.rollout_logp_bt, mask_bt, spec.sequence_ratio)
    correction, surrogate = CORRECTIONS[spec.correction], SURROGATES[spec.surrogate]
    q_b1 = mismatch.sequence_ratio_b1
    weight_bt = correction.function(mismatch.ratio_bt, q_b1, **spec.values(correction.fields))
    if spec.sequence_range is not None:
        weight_bt = drop_sequences(weight_bt, q_b1, spec.sequence_range)
    # l = w·ℓ + β·KL − c·H, and the teacher's KL
    policy_ratio_bt = ratio_bt
    base_bt = x.rollout_logp_bt if surrogate.by_sampler else x.old_logp_bt
    if surrogate.by_sampler:
        policy_ratio_bt = policy_ratio(x.logp_bt, base_bt, mask_bt, spec.level)
    if spec.level == "sequence" and arrays.adv_b.ndim == 2:
        own_bt = mx.exp(x.logp_bt - mx.stop_gradient(x.logp_bt))
        policy_ratio_bt = mx.stop_gradient(ratio_bt) * own_bt
    arrays_bt = {"old_logp_bt": x.old_logp_bt, "mask_bt": mask_bt, "weight_bt": weight_bt}
    term_bt = surrogate.function(
        policy_ratio_bt,
        adv,
        x.logp_bt,
        **spec.values(surrogate.fields),
        **{name: arrays_bt[name] for name in surrogate.arrays},
    )
    if "weight_bt" not in surrogate.arrays:
        term_bt = weight_bt * term_bt
    inside_bt = None
    if surrogate.region is not None:
        inside_bt = surrogate.region(x.logp_bt, base_bt, adv, spec.epsilon_low, spec.upper_epsilon)
        term_bt = mx.where(inside_bt, term_bt, 0.0)
    if x.keep_bt is not None:
        term_bt = mx.where(x.keep_bt, term_bt, 0.0)

    kl_bt = mx.zeros_like(x.logp_bt)
    if x.ref_logp_bt is not None:
        kl_bt = kl_estimate(spec.kl, x.logp_bt, x.ref_logp_bt)
    if spec.beta > 0:
        term_bt = term_bt + spec.beta * (kl_bt * ratio_bt if spec.kl_bias_corrected else kl_bt)
    if spec.entropy_coef > 0:
        term_bt = term_bt - spec.entropy_coef * x.entropy_bt
    if teacher_coef > 0 and x.teacher_kl_bt is not None:
        term_bt = term_bt + teacher_coef * x.teacher_kl_bt

    length_b = mask_bt.sum(axis=1)
    sum_b = (mask_bt * term_bt).sum(axis=1)
    total = (sum_b / mx.maximum(length_b, 1) if aggregation.row_mean else sum_b).sum()
    stats = loss_stats(x, spec, ratio_bt, kl_bt, mismatch, weight_bt, inside_bt, total, denominator)
    return total, stats


def _cleaned(arrays: LossArrays) -> LossInputs:
    counted_bt = arrays.mask_bt.astype(mx.bool_)
    mask_bt = counted_bt.astype(mx.float32)
    length_b = mask_bt.sum(axis=1)

    def clean(array: mx.array) -> mx.array:
        return mx.where(counted_bt, mx.maximum(array.astype(mx.float32), LOWEST), 0.0)

    def held(array: mx.array | None, default: mx.array) -> mx.array:
        return mx.stop_gradient(default if array is None else clean(array))

    by_row = arrays.adv_b.ndim == 1
    adv = arrays.adv_b[:, None] if by_row else arrays.adv_b
    present = length_b[:, None] > 0 if by_row else counted_bt
    logp_bt = clean(arrays.logp_bt)
    old_bt = held(arrays.old_logp_bt, logp_bt)
    ref_bt, teacher_bt = arrays.ref_logp_bt, arrays.teacher_kl_bt
    sequences, tokens = arrays.num_sequences, arrays.num_tokens
    return LossInputs(
        logp_bt=logp_bt,
        adv=mx.stop_gradient(mx.where(present, adv.astype(mx.float32), 0.0)),
        mask_bt=mask_bt,
        old_logp_bt=old_bt,
        rollout_logp_bt=held(arrays.rollout_logp_bt, old_bt),
        ref_logp_bt=None if ref_bt is None else held(ref_bt, logp_bt),
        entropy_bt=mx.zeros_like(logp_bt)
        if arrays.entropy_bt is None
        else clean(arrays.entropy_bt),
        teacher_kl_bt=None if teacher_bt is None else clean(teacher_bt),
        keep_bt=None if arrays.keep_bt is None else arrays.keep_bt.astype(mx.bool_),
        num_sequences=(mx.array(mask_bt.shape[0]) if sequences is None else sequences).astype(
            mx.float32
        ),
        num_tokens=(length_b.sum() if tokens is None else tokens).astype(mx.float32),
    )


def _check(
    arrays: LossArrays, spec: LossSpec, max_completion_length: int | None, teacher_coef: float
) -> None:
    check_rank("logp_bt", arrays.logp_bt, 2)
    shape = arrays.logp_bt.shape
    check_shape("adv_b", arrays.adv_b, shape if arrays.adv_b.ndim == 2 else shape[:1])
    for name, array in arrays._asdict().items():
        if array is not None and name.endswith("_bt"):
            check_shape(name, array, shape)
    if spec.correction != "none" and arrays.rollout_logp_bt is None:
        raise ValueError(
            f"correction = {spec.correction!r} requires rollout_logp_bt, the sampler's log-probs"
        )
    if spec.beta > 0 and arrays.ref_logp_bt is None:
        raise ValueError(f"beta = {spec.beta} requires ref_logp_bt, the reference's log-probs")
    if spec.entropy_coef > 0 and arrays.entropy_bt is None:
        raise ValueError(f"entropy_coef = {spec.entropy_coef} requires entropy_bt")
    if teacher_coef > 0 and arrays.teacher_kl_bt is None:
        raise ValueError(f"teacher_coef = {teacher_coef} requires teacher_kl_bt")
    check_max_length(spec.aggregation, max_completion_length)
