"""Trust regions and surrogates of whole rows, against float64 and against verl and TRL."""

import attrs
import numpy as np
import pytest

import grpo_fn as g
from tests.support import trust_regions as reference
from tests.support.properties.harness import run_library

NAMES = tuple(reference.FIELDS)
each_surrogate = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sum"])
@pytest.mark.parametrize("by_token", [False, True], ids=["row advantages", "token advantages"])
@each_surrogate
def test_value_and_gradient_match_the_formula(name, by_token, aggregation):
    """Twenty random batches with holes in their masks, against float64 and its central differences."""
    for seed in range(20):
        case = reference.make_case(name, seed, by_token=by_token, aggregation=aggregation)
        reference.assert_is_the_formula(case)


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate", "token_mask"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ipo"])
def test_a_correction_weights_the_surrogate(name, correction):
    """VESPO's w has the correction's weights as factors; the others are multiplied by them."""
    for seed in range(10):
        reference.assert_is_the_formula(reference.make_case(name, seed, correction=correction))


@each_surrogate
def test_masked_positions_are_as_if_deleted(name):
    """NaN and infinity at masked places change neither value nor gradient."""
    case = reference.make_case(name, 3)
    want = run_library(case)
    for garbage in (np.nan, np.inf, -np.inf):
        spoiled = case.with_tokens(lambda a, value=garbage: np.where(case.mask > 0, a, value).astype(a.dtype))
        reference.assert_close(run_library(spoiled), want.loss, want.grad, 0.0)
    assert not want.grad[case.mask == 0].any()


@each_surrogate
def test_any_split_into_rows_gives_the_same_sum(name):
    """The sum over a batch is that of its rows, so that micro-batches do not matter."""
    case = reference.make_case(name, 5, aggregation="sum")
    whole, parts = run_library(case), []
    for n in range(len(case.mask)):
        row = case.with_tokens(lambda array, n=n: array[n : n + 1])
        parts.append(run_library(attrs.evolve(row, adv=case.adv[n : n + 1], mask=case.mask[n : n + 1])))
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert np.allclose(np.concatenate([part.grad for part in parts]), whole.grad, atol=1e-6)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "ipo"])
def test_the_log_has_the_share_outside_the_region(name):
    """clip_low and clip_high are the shares of tokens outside the region, by the sign of A."""
    case = reference.make_case(name, 7, rows=8, tokens=20, drift=2.0)
    outside = ~reference.inside(case) & (case.mask > 0)
    stats, negative = run_library(case).stats, case.adv[:, None] < 0
    assert stats["clip_low"] == pytest.approx((outside & negative).sum() / case.mask.sum(), abs=1e-6)
    assert stats["clip_high"] == pytest.approx((outside & ~negative).sum() / case.mask.sum(), abs=1e-6)
    assert stats["clip_region"] > 0


@each_surrogate
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    """With π_θ = π_old = μ and one token per row, each has the gradient of `none`."""
    case = reference.make_case(name, 11)
    case = attrs.evolve(case.with_tokens(lambda _: case.logp[:, :1]), mask=np.ones_like(case.mask[:, :1]))
    plain = run_library(attrs.evolve(case, fields={"surrogate": "none"}))
    assert np.allclose(run_library(case).grad, plain.grad, atol=1e-6)


@each_surrogate
def test_sequence_ratios_and_corrections_of_ipo_are_refused(name):
    """They are defined with the ratio of a token; IPO's weight is π/μ already."""
    with pytest.raises(ValueError, match=f"'{name}' does not use a ratio of a whole completion"):
        g.LossSpec(surrogate=name, level="sequence")
    with pytest.raises(ValueError, match=r"correction = 'token_truncate': expected 'none'"):
        g.LossSpec(surrogate="ipo", correction="token_truncate")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ipo"])
def test_verl_or_trl_computes_the_same(name):
    """500 random batches, 10,000 in a campaign. IPO is prime-rl's, which is no package."""
    reference.compare_with_peer(name)
