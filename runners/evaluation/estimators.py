"""Statistics of a few hundred right or wrong answers: unbiased estimates, intervals, paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import attrs
import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000


@attrs.frozen
class Interval:
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a share (E. B. Wilson 1927); it stays within 0 and 1 and works at both ends.

    Raises ValueError for no trials, or successes outside 0 … trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(
            f"{successes} successes of {trials} trials: expected 0 <= successes <= trials, trials >= 1"
        )
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    # At either end middle and half cancel up to rounding.
    low, high = max(middle - half, 0.0), min(middle + half, 1.0)
    return Interval(0.0 if successes == 0 else low, 1.0 if successes == trials else high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k): the chance that k of n samples, c of which are right, hold a right one.

    The estimator without bias of Codex (arXiv 2107.03374, eq. 1). Raises ValueError unless 0 <= c <= n and
    1 <= k <= n.
    """
    _check(n, k)
    if not 0 <= c <= n:
        raise ValueError(f"c = {c}: expected a number of samples from 0 to n = {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[int], silent: int, right: int | None, k: int) -> float:
    """The chance that the most frequent answer among k of the samples is the right one.

    The mean over all C(n, k) choices of k samples, so without bias. Samples without an answer do not vote.
    If t answers share the first place, each wins with 1/t; without votes no answer wins.

    Args:
        votes: how many samples gave each different answer.
        silent: how many samples gave no answer.
        right: which of `votes` is the right answer; None: no sample gave it.
        k: size of the choice, at most all samples.

    Raises ValueError for k out of range, and for votes below 1.
    """
    n = sum(votes) + silent
    _check(n, k)
    if any(count < 1 for count in votes) or silent < 0:
        raise ValueError(f"votes = {list(votes)}, silent = {silent}: expected positive counts")
    if right is None:
        return 0.0
    others = [count for i, count in enumerate(votes) if i != right]
    won = 0.0
    for first in range(1, min(votes[right], k) + 1):
        ways = _ways(others, silent, first, k - first)
        total = sum(count / (ties + 1) for ties, count in ways.items())
        won += math.comb(votes[right], first) * total
    return won / math.comb(n, k)


def _ways(others: Sequence[int], silent: int, most: int, rest: int) -> dict[int, int]:
    """Ways to choose `rest` samples of the others such that no answer comes more than `most` times.

    Keyed by the number of answers that come exactly `most` times.
    """
    table = {(0, 0): 1}  # (chosen, ties) -> ways, answer by answer
    for count in others:
        wider: dict[tuple[int, int], int] = {}
        for (chosen, ties), ways in table.items():
            for taken in range(min(count, most, rest - chosen) + 1):
                place = (chosen + taken, ties + (taken == most))
                wider[place] = wider.get(place, 0) + ways * math.comb(count, taken)
        table = wider
    found: dict[int, int] = {}
    for (chosen, ties), ways in table.items():
        if rest - chosen <= silent:
            found[ties] = found.get(ties, 0) + ways * math.comb(silent, rest - chosen)
    return found


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """Percentile interval of a mean by resampling the problems (Efron 1979); one seed, one interval.

    For a difference of two models give the differences problem by problem, which keeps the pairs. Raises
    ValueError for no values.
    """
    array = np.asarray(values, np.float64)
    if array.size == 0:
        raise ValueError("no values: expected one for each problem")
    rng = np.random.default_rng(seed)
    means = [array[rng.integers(0, array.size, array.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: the chance of so uneven a split if both models are equally good.

    Only problems that one model has right and the other wrong count; without any, p = 1.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"found {only_first} and {only_second} problems, expected counts")
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: expected a number of samples from 1 to n = {n}")
