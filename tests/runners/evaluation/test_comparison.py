"""Estimates against brute force, and intervals against published values and definitions."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.evaluation.comparison import bootstrap, pass_at_k, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        *((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),  # the mirror image of 0 of 20
    ],
)
def test_wilson_s_interval_has_the_published_values(successes, trials, low, high):
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    found = wilson(successes, trials)
    assert (found.low, found.high) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_mean_over_all_choices(n, data):
    """The estimate equals the count over all choices of k of n samples."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    samples = [True] * c + [False] * (n - c)
    choices = list(itertools.combinations(samples, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5), "C(1000, 500) is beyond floats"


def test_the_bootstrap_interval_is_about_that_of_the_mean():
    """For many values, the interval is mean ± 1.96 standard errors; it depends only on the seed."""
    values: Any = np.random.default_rng(1).random(2000)
    error = 1.96 * values.std() / math.sqrt(2000)
    found = bootstrap(values)
    assert found.low == pytest.approx(values.mean() - error, abs=error / 5)
    assert found.high == pytest.approx(values.mean() + error, abs=error / 5)
    assert found == bootstrap(values) != bootstrap(values, seed=1)
    assert bootstrap([0.5]).low == bootstrap([0.5]).high == 0.5
