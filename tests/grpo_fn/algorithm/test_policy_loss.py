"""policy_loss against the specification: value, gradients and statistics of every legal combination."""

import itertools
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings

import grpo_fn as g
from tests.support import reference
from tests.support.properties.harness import assert_matches_reference, run_library, run_reference
from tests.support.properties.strategies import all_field_sets, examples, loss_cases, make_case, spec_fields

# Closer than this to a kink or a threshold, float32 and float64 may take different sides.
MARGIN = 1e-4


def choices(fields):
    """The choices that are combined within a level and a surrogate."""
    correction = fields["correction"], fields["sequence_range"]
    return correction, (fields["beta"], fields["kl"], fields["kl_bias_corrected"]), fields["aggregation"]


def pairs(sets):
    """Each pair of choices that occurs in one of the sets."""
    return {pair for _, fields in sets for pair in itertools.combinations(enumerate(choices(fields)), 2)}


def every_third(sets):
    """A Latin square of the sets: those whose choices' numbers add up to a multiple of three."""
    numbers = [{} for _ in range(3)]
    taken = []
    for index, fields in sets:
        a, b, c = (seen.setdefault(x, len(seen)) for seen, x in zip(numbers, choices(fields), strict=True))
        if (a + 2 * b + c) % 3 == 0:
            taken.append((index, fields))
    return taken


@pytest.mark.parametrize(
    ("level", "surrogate"), sorted({(f["level"], f["surrogate"]) for f in all_field_sets()})
)
def test_every_legal_combination_matches_the_reference(level, surrogate):
    """All in a campaign; here a third, in which every pair of correction, KL and aggregation occurs."""
    among = [each for each in enumerate(all_field_sets()) if each[1]["level"] == level]
    among = [(index, fields) for index, fields in among if fields["surrogate"] == surrogate]
    taken = among if examples(1) > 1 else every_third(among)
    assert pairs(taken) == pairs(among)
    tried = 0
    for index, fields in taken:
        fields = fields | {"entropy_coef": 0.01 * (index % 2)}
        options: Any = dict(drift=("near", "wide")[index % 2], rollout=("near", "wide")[index // 2 % 2])
        case = make_case(index, fields, keep=index % 3 == 0, old_given=index % 5 > 0, **options)
        want = run_reference(case)
        if want.margin > MARGIN:
            assert_matches_reference(case, want=want)
            tried += 1
    assert tried > 0.9 * len(taken) > 50


@settings(max_examples=examples(200))
@given(case=loss_cases())
def test_any_batch_matches_the_reference(case):
    """Any shape, mask, spec, and any drift up to ratios far past the clamp."""
    want = run_reference(case)
    assume(want.margin > MARGIN)
    assert_matches_reference(case, want=want)


@settings(max_examples=examples(20))
@given(
    case=spec_fields(entropy_coef=0.01).flatmap(
        lambda fields: loss_cases(fields, drift="near", old_given=True)
    )
)
def test_reference_gradient_is_its_own_central_difference(case):
    """The specification's gradients are central differences of its value."""
    want, step = run_reference(case), 1e-6
    assume(want.margin > 1e-3)
    rounding = 8 * np.spacing(abs(want.loss)) / step  # of a difference: k3 may be 10^8 nats
    arrays = {name: getattr(case, name).astype(np.float64) for name in case.tokens()}
    spec, held = g.LossSpec(**case.fields), arrays["logp"].copy()

    def value(name, i, t, move):
        moved = {key: array.copy() for key, array in arrays.items()}
        moved[name][i, t] += move
        moved |= {"held_logp": held, "max_completion_length": case.max_completion_length}
        return reference.policy_loss(spec, moved.pop("logp"), case.adv.astype(float), case.mask, **moved).loss

    for name, grad, scale in (
        ("logp", want.grad, want.grad_scale),
        ("entropy", want.entropy_grad, abs(want.entropy_grad)),
    ):
        if name not in arrays:
            continue
        for i, t in np.argwhere(case.mask > 0)[:6]:
            difference = (value(name, i, t, step) - value(name, i, t, -step)) / (2 * step)
            tolerance = 1e-4 * np.max(np.broadcast_to(scale, grad.shape)) + 1e-8 + rounding
            assert abs(difference - grad[i, t]) <= tolerance, (name, i, t, difference, grad[i, t])


def test_sampler_diagnostics_are_taken_before_masking():
    """With every token dropped: the ratios stay, and of weights 1, 2, 3 the ESS is 36/(3·14) = 6/7."""
    spec = g.LossSpec(correction="token_mask", correction_range=(3.5, 4.0))
    old, rollout = mx.log(mx.array([[1.0, 2.0, 3.0]])), mx.zeros((1, 3))
    loss, stats = g.policy_loss(
        old, mx.array([1.0]), mx.ones((1, 3)), spec, old_logp_bt=old, rollout_logp_bt=rollout
    )
    assert float(loss) == 0.0 and float(stats.masked_fraction) == 1.0
    assert float(stats.is_ratio_min) == pytest.approx(1.0) and float(stats.is_ratio_max) == pytest.approx(3.0)
    assert float(stats.logp_diff_max) == pytest.approx(np.log(3.0), rel=1e-6)
    assert float(stats.ess) == pytest.approx(6 / 7, rel=1e-6)


BY_TOKEN = ("mask_bt", "old_logp_bt", "rollout_logp_bt", "ref_logp_bt", "keep_bt")


@pytest.mark.parametrize(
    ("changes", "arrays", "named"),
    [
        (dict(correction="token_truncate"), {}, "rollout_logp_bt"),
        (dict(beta=0.1), {}, "ref_logp_bt"),
        (dict(entropy_coef=0.1), {}, "entropy_bt"),
        (dict(aggregation="constant"), {}, "max_completion_length"),
        *[({}, {name: mx.zeros((3, 1))}, name) for name in ("adv_b", *BY_TOKEN)],
    ],
)
def test_what_is_missing_or_would_broadcast_is_refused(changes, arrays, named):
    """The message names an argument that is missing or has another shape than [B,T]."""
    arrays = dict(adv_b=mx.zeros(3), mask_bt=mx.ones((3, 3))) | arrays
    with pytest.raises(ValueError, match=named):
        g.policy_loss(mx.zeros((3, 3)), spec=g.LossSpec(**changes), **arrays)


@given(loss_cases(style="full"))
def test_impossible_tokens_that_count_leave_everything_finite(case):
    """Log-probs of −∞ give finite values, and no gradient at those tokens."""
    arrays = {name: getattr(case, name) for name in ("logp", "old", "rollout", "ref")}
    given_arrays = {name: array.copy() for name, array in arrays.items() if array is not None}
    for number, array in enumerate(given_arrays.values()):
        array.flat[number :: len(given_arrays)] = -np.inf
        array.flat[-1] = -np.inf  # in all of them
    got = run_library(attrs.evolve(case, **given_arrays))
    assert np.isfinite([got.loss, *got.stats.values()]).all() and np.isfinite(got.grad).all()
    assert (got.grad[np.isinf(given_arrays["logp"])] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_a_batch_without_tokens_has_no_loss(shape):
    """The loss is 0, with a gradient of the same shape."""
    empty = mx.zeros(shape)
    loss, stats = g.policy_loss(empty, mx.zeros(shape[:1]), empty, g.LossSpec())
    assert float(loss) == 0.0 and float(stats.denominator) == shape[0]
    grad = mx.grad(lambda logp: g.policy_loss(logp, mx.zeros(shape[:1]), empty, g.LossSpec())[0])(empty)
    assert grad.shape == shape
