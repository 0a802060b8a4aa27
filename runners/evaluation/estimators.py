"""Statistics of a few hundred right or wrong answers: unbiased estimates, intervals, paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a share (E. B. Wilson 1927); it stays within 0 and 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    # At either end middle and half cancel up to rounding.
    low, high = max(middle - half, 0.0), min(middle + half, 1.0)
    return Interval(0.0 if successes == 0 else low, 1.0 if successes == trials else high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): the chance that k of n samples, c of which are right, hold a right one.

    The estimator without bias of Codex (arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """Percentile interval of a mean by resampling the problems (Efron 1979); one seed, one interval.

    For a difference of two models give the differences problem by problem, which keeps the pairs.
    """
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = [array[rng.integers(0, array.size, array.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: the chance of so uneven a split if both models are equally good.

    Only problems that one model has right and the other wrong count; without any, p = 1.
    """
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)
