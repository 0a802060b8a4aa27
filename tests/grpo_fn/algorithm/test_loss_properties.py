"""Properties that every combination of the loss must have, whatever its numbers are."""

import itertools

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.algorithm import loss as losses
from tests.support.properties.harness import ARGUMENTS, run_library, run_reference, same_outcome
from tests.support.properties.strategies import (
    AGGREGATIONS,
    LEVELS,
    SURROGATES,
    examples,
    legal,
    loss_cases,
    make_case,
    spec_fields,
)

GARBAGE = (np.nan, np.inf, -np.inf, 3e38, -3e38, -1e4)


@settings(max_examples=examples(75))
@given(case=loss_cases(), seed=st.integers(0, 2**32 - 1))
def test_garbage_at_masked_places_touches_nothing(case, seed):
    """Garbage at masked places, or as a masked row's advantage, changes no bit; the gradient there is 0."""
    rng = np.random.default_rng(seed)
    hidden = case.mask == 0

    def spoil(array):
        return np.where(hidden, rng.choice(GARBAGE, array.shape), array).astype(np.float32)

    adv = np.where(hidden.all(axis=1), rng.choice(GARBAGE, case.adv.shape), case.adv).astype(np.float32)
    clean, spoiled = run_library(case), run_library(attrs.evolve(case.with_tokens(spoil), adv=adv))
    assert clean.loss == spoiled.loss and clean.stats == spoiled.stats
    for before, after in ((clean.grad, spoiled.grad), (clean.entropy_grad, spoiled.entropy_grad)):
        np.testing.assert_array_equal(before, after)
        assert (after[hidden] == 0.0).all()


@settings(max_examples=examples(30))
@given(data=st.data(), fields=spec_fields(), seed=st.integers(0, 2**32 - 1))
def test_masked_is_deleted(data, fields, seed):
    """Tokens scattered among garbage give the same result as the tokens alone with a full mask."""
    rows, kept, width = (data.draw(st.integers(low, high)) for low, high in ((1, 5), (1, 5), (5, 9)))
    alone = make_case(seed, fields, rows=rows, tokens=kept, style="full", drift="wide", keep=True)
    rng = np.random.default_rng(seed)
    places = np.array([np.sort(rng.permutation(width)[:kept]) for _ in range(rows)])

    def scatter(array):
        wide = rng.choice(GARBAGE, (rows, width)).astype(np.float32)
        np.put_along_axis(wide, places, array, axis=1)
        return wide

    mask = np.zeros((rows, width), np.float32)
    np.put_along_axis(mask, places, 1.0, axis=1)
    among = run_library(attrs.evolve(alone.with_tokens(scatter), mask=mask))
    assert (among.grad[mask == 0] == 0).all()
    gathered = attrs.evolve(
        among,
        grad=np.take_along_axis(among.grad, places, axis=1),
        entropy_grad=np.take_along_axis(among.entropy_grad, places, axis=1),
    )
    same_outcome(gathered, run_library(alone), alone)


@given(case=loss_cases(rows=6), cut=st.integers(1, 5))
def test_sums_and_stats_of_parts_merge_into_the_whole(case, cut):
    """`loss_sum` adds up, `merge_stats` of two parts equals the stats of both together."""
    spec = g.LossSpec(**case.fields)
    names = ARGUMENTS | {"entropy": "entropy_bt"}

    def of(rows):
        given = {names[n]: mx.array(getattr(case, n)[rows]) for n in case.tokens() if n != "logp"}
        arrays = (mx.array(a[rows]) for a in (case.logp, case.adv, case.mask))
        return losses.loss_sum(losses.LossArrays(*arrays, **given), spec, case.max_completion_length)

    (whole, stats), parts = of(slice(None)), [of(slice(0, cut)), of(slice(cut, None))]
    scale = run_reference(case).loss_scale
    size = scale * max(float(stats.denominator), 1.0)
    assert abs(sum(float(part) for part, _ in parts) - float(whole)) <= 1e-6 * size
    divided_by = float(stats.denominator) or 1.0  # a `sum` is not divided
    assert float(whole) == pytest.approx(float(stats.loss) * divided_by, abs=1e-6 * size)
    for name, value in g.merge_stats([part for _, part in parts])._asdict().items():
        slack = 1e-6 * scale if name == "loss" else 1e-5
        assert float(value) == pytest.approx(float(getattr(stats, name)), rel=1e-5, abs=slack), name


@given(case=loss_cases(drift="near", old_given=True))
def test_gradients_flow_through_the_policy_alone(case):
    """π_old, μ, π_ref and the advantages are constants: their gradient is exactly 0."""
    argument = {name: ARGUMENTS[name] for name in ("old", "rollout", "ref")} | {"adv": "adv_b"}
    given = {argument[n]: mx.array(getattr(case, n)) for n in argument if getattr(case, n) is not None}
    entropy = None if case.entropy is None else mx.array(case.entropy)
    fixed = {"entropy_bt": entropy, "max_completion_length": case.max_completion_length}
    spec = g.LossSpec(**case.fields)

    def of(inputs):
        arrays = {name: array for name, array in inputs.items() if name != "adv_b"}
        loss, _ = g.policy_loss(
            mx.array(case.logp), inputs["adv_b"], mx.array(case.mask), spec, **arrays, **fixed
        )
        return loss

    for name, gradient in mx.grad(of)(given).items():
        assert (np.array(gradient) == 0).all(), name


@pytest.mark.parametrize(
    ("level", "surrogate", "aggregation"),
    [choice for choice in itertools.product(LEVELS, SURROGATES, AGGREGATIONS) if legal(*choice)],
)
def test_a_drifted_policy_stays_finite(level, surrogate, aggregation):
    """Loss and gradient are finite after 100 nats of drift, gradual or in one token, up or down."""
    rng = np.random.default_rng(0)
    spread = rng.uniform(0, 1, (4, 300))
    drift = 100 * spread / spread.sum(axis=1, keepdims=True) * np.array([[1], [-1], [1], [-1]])
    drift[2:, 0], drift[2:, 1:] = [100.0, -100.0], 0.0
    old = -rng.uniform(0.1, 3.0, (4, 300))
    fields = dict(level=level, surrogate=surrogate, aggregation=aggregation, beta=0.1, kl_bias_corrected=True)
    fields |= dict(correction="token_truncate", sequence_range=(1e-9, 1e9))
    case = make_case(0, fields | ({"dual_clip": 3.0} if surrogate == "dual_clip" else {}), rows=4, tokens=300)
    case = attrs.evolve(
        case,
        logp=(old + drift).astype(np.float32),
        old=old.astype(np.float32),
        rollout=(old - drift).astype(np.float32),
        ref=(old + 2 * drift).astype(np.float32),
        mask=np.ones((4, 300), np.float32),
        adv=np.array([1.0, -1.0, -1.0, 1.0], np.float32),
    )
    got = run_library(case)
    assert np.isfinite(got.loss) and np.isfinite(got.grad).all()
    assert all(np.isfinite(value) for value in got.stats.values()), got.stats


@settings(max_examples=examples(10))
@given(case=loss_cases(drift="near"), dtype=st.sampled_from([mx.bfloat16, mx.float16]))
def test_inputs_of_other_dtypes_are_computed_in_float32(case, dtype):
    """16-bit arrays give the float32 numbers of the same values; masks may be bool, int32 or float32."""
    rounded = case.with_tokens(lambda a: np.array(mx.array(a).astype(dtype).astype(mx.float32)))
    full = run_library(rounded)
    for mask_dtype in (mx.bool_, mx.int32):
        half = run_library(rounded, dtype=dtype, mask_dtype=mask_dtype)
        assert half.loss == full.loss and half.stats == full.stats
        # The gradient has logp's dtype, and float16 ends at 65,504.
        grads = [np.clip(run.grad, -6e4, 6e4) for run in (half, full)]
        np.testing.assert_allclose(*grads, rtol=1e-2, atol=1e-6)
