"""Trust regions and surrogates of whole rows, against float64 and against verl and TRL."""

import numpy as np
import pytest

import grpo_fn as g
from tests.support import trust_regions as reference

NAMES = tuple(reference.FIELDS)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sum"])
@pytest.mark.parametrize("by_token", [False, True], ids=["row advantages", "token advantages"])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_match_the_formula(name, by_token, aggregation):
    """Twenty random batches with holes in their masks, against float64 and its central differences."""
    for seed in range(20):
        case = reference.random_case(seed, by_token)
        spec = g.LossSpec(surrogate=name, aggregation=aggregation, **reference.FIELDS[name])
        reference.assert_close(case.ours(spec), case.formula(spec), 1e-5)


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate", "token_mask"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ipo"])
def test_a_correction_weights_the_surrogate(name, correction):
    """VESPO's w has the correction's weights as factors; the others are multiplied by them."""
    for seed in range(10):
        case = reference.random_case(seed)
        spec = g.LossSpec(surrogate=name, correction=correction, **reference.FIELDS[name])
        reference.assert_close(case.ours(spec), case.formula(spec), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_are_as_if_deleted(name):
    """NaN and infinity behind the mask change neither value nor gradient."""
    case = reference.random_case(3)
    spec = g.LossSpec(surrogate=name, **reference.FIELDS[name])
    want, gradient = case.ours(spec)
    for garbage in (np.nan, np.inf, -np.inf):
        got = case.with_garbage(garbage).ours(spec)
        reference.assert_close(got, (want, gradient), 0.0)
    assert not gradient[case.mask == 0].any()


@pytest.mark.parametrize("name", NAMES)
def test_any_split_into_rows_gives_the_same_sum(name):
    """The sum over a batch is that of its rows, so that micro-batches do not matter."""
    case = reference.random_case(5)
    spec = g.LossSpec(surrogate=name, aggregation="sum", **reference.FIELDS[name])
    whole, gradient = case.ours(spec)
    parts = [case.row(n).ours(spec) for n in range(len(case.mask))]
    assert sum(value for value, _ in parts) == pytest.approx(whole, rel=1e-5)
    assert np.allclose(np.concatenate([part for _, part in parts]), gradient, atol=1e-6)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "ipo"])
def test_the_log_has_the_share_outside_the_region(name):
    """clip_low and clip_high are the shares of tokens outside the region, by the sign of A."""
    case = reference.random_case(7, rows=8, tokens=20, drift=2.0)
    spec = g.LossSpec(surrogate=name, **reference.FIELDS[name])
    outside = ~case.inside(spec) & (case.mask > 0)
    stats = case.stats(spec)
    counted = case.mask.sum()
    adv = np.broadcast_to(case.adv[:, None], outside.shape)
    assert float(stats.clip_low) == pytest.approx((outside & (adv < 0)).sum() / counted, abs=1e-6)
    assert float(stats.clip_high) == pytest.approx((outside & (adv > 0)).sum() / counted, abs=1e-6)
    assert float(stats.clip_region) > 0


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    """With π_θ = π_old = μ and one token a row each of them has the gradient of `none`."""
    case = reference.random_case(11).on_policy()
    plain = case.ours(g.LossSpec(surrogate="none"))[1]
    got = case.ours(g.LossSpec(surrogate=name, **reference.FIELDS[name]))[1]
    assert np.allclose(got, plain, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_ratio_of_a_sequence(name):
    """They are defined with the ratio of a token."""
    with pytest.raises(ValueError, match=f"'{name}' does not use a ratio of a whole completion"):
        g.LossSpec(surrogate=name, level="sequence")


def test_ipo_takes_no_correction():
    """Its weight is π/μ already."""
    with pytest.raises(ValueError, match=r"correction = 'token_truncate': expected 'none'"):
        g.LossSpec(surrogate="ipo", correction="token_truncate")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ipo"])
def test_verl_or_trl_computes_the_same(name):
    """Five hundred random batches, or ten thousand in a campaign; skipped without PyTorch and the peer.

    IPO is prime-rl's, which is no package: its formula is tested above.
    """
    reference.compare_with_peer(name)
