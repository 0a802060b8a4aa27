"""policy_loss: the loss that a LossSpec names, with its diagnostics.

    l = w·ℓ + β·KL − c·H        loss = Σ weighted l / denominator

Everything is float32 and every input is replaced by zero at masked positions before any arithmetic, so
that whatever stands there (NaN and inf too) reaches neither the value nor the gradient.
"""

import mlx.core as mx

from grpo_fn.algorithm.diagnostics import LossStats
from grpo_fn.algorithm.kl import kl_estimate
from grpo_fn.algorithm.ratios import policy_ratio, rollout_correction
from grpo_fn.algorithm.spec import LossSpec
from grpo_fn.algorithm.surrogates import CLIPPED_SIDES, SURROGATES
from grpo_fn.checks import check_rank, check_shape


def empty_stats(
    spec: LossSpec, num_sequences: mx.array, num_tokens: mx.array, max_completion_length: int | None
) -> LossStats:
    """The stats of a batch none of whose rows reached the learner: denominators only."""
    zero = mx.array(0.0)
    denominator = _denominator(spec, num_sequences, num_tokens, max_completion_length)
    return LossStats(*(denominator if name == "denominator" else zero for name in LossStats._fields))


def _denominator(
    spec: LossSpec, sequences: mx.array, tokens: mx.array, max_completion_length: int | None
) -> mx.array:
    if spec.aggregation == "token_mean":
        return tokens
    if spec.aggregation == "constant":
        assert max_completion_length is not None  # _check_needs
        return sequences * max_completion_length
    return sequences


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
) -> tuple[mx.array, LossStats]:
    """The loss of a batch of completions, to be minimised.

    Args:
        logp_bt: log π_θ of the sampled tokens at the sampling temperature, [B,T], nats; differentiable.
        adv_b: advantage of each completion, [B].
        mask_bt: 1 (or True) on tokens that count, [B,T].
        spec: the algorithm.
        old_logp_bt: log π_old, [B,T]; left out, π_old is π_θ itself and `sg(logp_bt)` is used.
        rollout_logp_bt: log μ as the sampler gave it, [B,T]; needed by a correction, logged without one.
        ref_logp_bt: log π_ref, [B,T]; needed where `spec.beta` > 0.
        max_completion_length: L_max, tokens; needed by the aggregation `constant`.
        entropy_bt: entropy of π_θ at each position, [B,T], nats; needed where `spec.entropy_coef` > 0.
        keep_bt: 0/1, [B,T]: tokens whose policy term counts (top-entropy masking); KL and denominators
            keep them all.

    Returns:
        (loss, stats), float32; with no counted token the loss and its gradient are 0.

    Raises:
        ValueError: a shape is wrong, or the spec needs an array that was left out.
    """
    total, stats = loss_sum(
        logp_bt,
        adv_b,
        mask_bt,
        spec,
        old_logp_bt=old_logp_bt,
        rollout_logp_bt=rollout_logp_bt,
        ref_logp_bt=ref_logp_bt,
        max_completion_length=max_completion_length,
        entropy_bt=entropy_bt,
        keep_bt=keep_bt,
    )
    return total / mx.maximum(stats.denominator, 1e-30), stats


def loss_sum(
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
    num_sequences: mx.array | None = None,
    num_tokens: mx.array | None = None,
) -> tuple[mx.array, LossStats]:
    """`policy_loss` before its division: the sum, with the denominator in the stats.

    The learner accumulates both and divides once, so that any split of a batch gives the same step.
    `num_sequences` and `num_tokens` (0-d) replace the counts of these rows in the denominator, where rows
    that take no part in the gradient were left out, or rows of padding added.
    """
    check_rank("logp_bt", logp_bt, 2)
    shape = logp_bt.shape
    check_shape("adv_b", adv_b, shape[:1])
    for name, array in {
        "mask_bt": mask_bt,
        "old_logp_bt": old_logp_bt,
        "rollout_logp_bt": rollout_logp_bt,
        "ref_logp_bt": ref_logp_bt,
        "entropy_bt": entropy_bt,
        "keep_bt": keep_bt,
    }.items():
        if array is not None:
            check_shape(name, array, shape)
    _check_needs(spec, rollout_logp_bt, ref_logp_bt, entropy_bt, max_completion_length)

    counted_bt = mask_bt.astype(mx.bool_)
    mask_bt = counted_bt.astype(mx.float32)
    length_b = mask_bt.sum(axis=1)

    def clean(array: mx.array) -> mx.array:
        return mx.where(counted_bt, array.astype(mx.float32), 0.0)

    logp_bt = clean(logp_bt)
    old_bt = mx.stop_gradient(logp_bt if old_logp_bt is None else clean(old_logp_bt))
    rollout_bt = old_bt if rollout_logp_bt is None else mx.stop_gradient(clean(rollout_logp_bt))
    adv_b1 = mx.where(length_b > 0, adv_b.astype(mx.float32), 0.0)[:, None]
    adv_b1 = mx.stop_gradient(adv_b1)

    ratio_bt = policy_ratio(logp_bt, old_bt, mask_bt, spec.level)  # [B,T]
    mismatch = rollout_correction(old_bt, rollout_bt, mask_bt, spec)
    term_bt = mismatch.weight_bt * SURROGATES[spec.surrogate](ratio_bt, adv_b1, logp_bt, spec)
    if keep_bt is not None:
        term_bt = mx.where(keep_bt.astype(mx.bool_), term_bt, 0.0)

    kl_bt = mx.zeros_like(logp_bt)
    if ref_logp_bt is not None:
        kl_bt = kl_estimate(spec.kl, logp_bt, mx.stop_gradient(clean(ref_logp_bt)))
        if spec.beta > 0:
            term_bt = term_bt + spec.beta * (kl_bt * ratio_bt if spec.kl_bias_corrected else kl_bt)
    clean_entropy_bt = mx.zeros_like(logp_bt) if entropy_bt is None else clean(entropy_bt)
    if spec.entropy_coef > 0:
        term_bt = term_bt - spec.entropy_coef * clean_entropy_bt

    sequences = mx.array(float(shape[0])) if num_sequences is None else num_sequences.astype(mx.float32)
    tokens = length_b.sum() if num_tokens is None else num_tokens.astype(mx.float32)
    summed_b = (mask_bt * term_bt).sum(axis=1)
    if spec.aggregation == "sequence_mean":
        summed_b = summed_b / mx.maximum(length_b, 1)
    total = summed_b.sum()
    denominator = _denominator(spec, sequences, tokens, max_completion_length)

    sides = CLIPPED_SIDES.get(spec.surrogate, ())
    low_bt = (ratio_bt < 1 - spec.epsilon_low) & (adv_b1 < 0) & ("low" in sides)
    high_bt = (ratio_bt > 1 + spec.upper_epsilon) & (adv_b1 > 0) & ("high" in sides)
    seen = length_b.sum()
    rows = (length_b > 0).astype(mx.float32).sum()
    num_ratios = rows if spec.level == "sequence" else seen

    def mean(values_bt: mx.array) -> mx.array:
        return (values_bt * mask_bt).sum() / mx.maximum(seen, 1)

    def share(clipped_bt: mx.array) -> mx.array:
        # At masked positions the ratio is 1, or the row's.
        clipped = clipped_bt.any(axis=1) if spec.level == "sequence" else clipped_bt
        return clipped.sum() / mx.maximum(num_ratios, 1)

    def extreme(values_bt: mx.array, least: bool) -> mx.array:
        kept = mx.where(counted_bt, values_bt, mx.inf if least else -mx.inf)
        return mx.where(seen > 0, kept.min() if least else kept.max(), 0.0)

    difference_bt, d_bt, is_ratio_bt = old_bt - rollout_bt, mismatch.log_ratio_bt, mismatch.ratio_bt
    stats = LossStats(
        loss=total / mx.maximum(denominator, 1e-30),
        denominator=denominator,
        num_tokens=seen,
        num_sequences=rows,
        kl=mean(kl_bt),
        entropy=mean(clean_entropy_bt),
        num_ratios=num_ratios,
        clip_low=share(low_bt),
        clip_high=share(high_bt),
        clip_region=share(low_bt | high_bt),
        ratio_mean=mean(ratio_bt),
        ratio_min=extreme(ratio_bt, True),
        ratio_max=extreme(ratio_bt, False),
        logp_diff_mean=mean(mx.abs(difference_bt)),
        logp_diff_max=extreme(mx.abs(difference_bt), False),
        is_ratio_mean=mean(is_ratio_bt),
        is_ratio_min=extreme(is_ratio_bt, True),
        is_ratio_max=extreme(is_ratio_bt, False),
        is_ratio_sq_mean=mean(mx.square(is_ratio_bt)),
        sampling_kl_k1=mean(-d_bt),
        sampling_kl_k3=mean(mx.exp(d_bt) - d_bt - 1),
        masked_fraction=mean(mismatch.weight_bt == 0),
    )
    return total, LossStats(*(mx.stop_gradient(value) for value in stats))


def _check_needs(
    spec: LossSpec,
    rollout_logp_bt: mx.array | None,
    ref_logp_bt: mx.array | None,
    entropy_bt: mx.array | None,
    max_completion_length: int | None,
) -> None:
    if spec.correction != "none" and rollout_logp_bt is None:
        raise ValueError(f"correction = {spec.correction!r} needs rollout_logp_bt, the sampler's log-probs")
    if spec.beta > 0 and ref_logp_bt is None:
        raise ValueError(f"beta = {spec.beta} needs ref_logp_bt, the reference's log-probs")
    if spec.entropy_coef > 0 and entropy_bt is None:
        raise ValueError(f"entropy_coef = {spec.entropy_coef} needs entropy_bt")
    if spec.aggregation == "constant" and (max_completion_length is None or max_completion_length < 1):
        raise ValueError(
            f"aggregation = 'constant' needs max_completion_length >= 1; found {max_completion_length}"
        )
