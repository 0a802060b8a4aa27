"""The three estimators of KL(π_θ ‖ π_ref)."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.algorithm.kl import kl_estimate
from tests.support import reference
from tests.support.properties.strategies import KLS

nats = st.floats(-40.0, 0.0, width=32)


@given(logp=nats, ref=nats, kind=st.sampled_from(KLS))
def test_estimate_and_slope_match_the_reference(logp, ref, kind):
    """Value and derivative at any pair of log-probabilities, on the straight parts of k2 and k3 as well."""
    value, slope = mx.value_and_grad(lambda x: kl_estimate(kind, x, mx.array(ref)))(mx.array(logp))
    want, want_slope = reference.kl_estimate(kind, logp, ref)
    size = abs(want) + 2 * abs(ref - logp) + 2.0 if kind == "k3" else 0.0
    assert float(value) == pytest.approx(want, rel=1e-5, abs=1e-6 * size + 1e-12)
    assert float(slope) == pytest.approx(want_slope, rel=1e-5, abs=1e-6 * size + 1e-12)


@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 1e-6), ("k2", 2e-2), ("k3", 1e-6)])
def test_the_mean_over_the_policy_is_the_divergence(kind, tolerance):
    """Σ_v π_θ(v)·estimate(v) is KL(π_θ ‖ π_ref) itself: exactly for k1 and k3, to second order for k2."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, 50)
    policy = np.exp(logits) / np.exp(logits).sum()
    moved = np.exp(logits + rng.normal(0, 0.1, 50))
    ref = moved / moved.sum()
    divergence = (policy * np.log(policy / ref)).sum()
    estimates = kl_estimate(kind, mx.array(np.log(policy)), mx.array(np.log(ref)))
    assert (policy * np.array(estimates)).sum() == pytest.approx(divergence, rel=tolerance * 10, abs=1e-7)


def test_a_token_of_probability_zero_stays_finite():
    """One policy rules the token out: the estimate is a large number. An unknown kind is an error."""
    for kind in KLS:
        for logp, ref in ((0.0, -np.inf), (-np.inf, 0.0)):
            assert np.isfinite(float(kl_estimate(kind, mx.array(logp), mx.array(ref))))
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_estimate("k4", mx.array(0.0), mx.array(0.0))
