"""Compares models on the same problems: estimates, intervals and paired differences, as a table and
as JSON.
"""

import io
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import attrs
import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 1000  # in columns; wide enough that tables are never wrapped
CONFIDENCE = 0.95
RESAMPLES = 2000


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Returns Wilson's score interval for a share (E. B. Wilson 1927). The interval stays within 0
    and 1.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    half = z / (1 + z * z / trials) * spread
    # At both ends, middle and half cancel up to rounding.
    return Interval(
        0.0 if successes == 0 else max(middle - half, 0.0),
        1.0 if successes == trials else min(middle + half, 1.0),
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns 1 − C(n−c, k)/C(n, k): the probability that k out of n samples, c of which are right,
    include a right one.

    The formula is the unbiased estimator from the Codex paper (arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap(values: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """Computes a mean's percentile interval by resampling the problems (Efron 1979), with a fixed
    seed.

    To compare two models, pass the differences per problem, which preserves the pairs.
    """
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = [array[rng.integers(0, array.size, array.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


@attrs.frozen(eq=False)
class Metric:
    """One value per problem, with the values' mean and interval."""

    values: np.ndarray  # float64; NaN for a problem without a value
    percent: bool = False  # shown as a percentage

    @property
    def mean(self) -> float:
        """Mean over the problems that have a value, or NaN if no problem has one."""
        known = self.values[~np.isnan(self.values)]
        return float(known.mean()) if known.size else float("nan")

    @property
    def interval(self) -> Interval | None:
        """95 % interval: Wilson's if each value is 0 or 1, otherwise a bootstrap over problems.
        None means that no problem has a value.
        """
        known = self.values[~np.isnan(self.values)]
        if not known.size:
            return None
        if self.percent and set(known.tolist()) <= {0.0, 1.0}:
            return wilson(round(known.sum()), known.size)
        return bootstrap(known.tolist())


@attrs.frozen(eq=False)
class ModelResult:
    """The results of one model on some problems."""

    model: str
    indices: tuple[int, ...]  # row numbers in the data
    metrics: dict[str, Metric]  # name -> values in the order of `indices`
    completions: tuple[dict[str, Any], ...]  # JSON rows
    problems: tuple[str, ...]  # messages about faults in scoring


def difference(first: Metric, second: Metric) -> Metric:
    """Returns the second model's values minus the first's, per problem. The interval resamples the
    pairs.
    """
    return Metric(second.values - first.values)


def shared(measured: Sequence[ModelResult]) -> list[ModelResult]:
    """Restricts the models' results to the problems that both have completed."""
    common = set.intersection(*(set(each.indices) for each in measured))

    def cut(each: ModelResult) -> ModelResult:
        places = [place for place, index in enumerate(each.indices) if index in common]
        return attrs.evolve(
            each,
            indices=tuple(each.indices[place] for place in places),
            metrics={
                name: Metric(one.values[places], one.percent) for name, one in each.metrics.items()
            },
        )

    return [cut(each) for each in measured]


def comparison_table(measured: Sequence[ModelResult]) -> str:
    """Returns a Markdown table with a row per metric, a column per model and, for two models, a
    column for the difference.

    Brackets contain the 95 % interval.
    """
    measured = shared(measured)
    first = measured[0]
    headings = [f"{len(first.indices)} problems", *(each.model for each in measured)]
    two = len(measured) == 2
    lines = Table(*headings, *(["difference"] if two else []), box=MARKDOWN)
    for name, metric in first.metrics.items():
        numbers = [each.metrics[name] for each in measured]
        cells = [_cell(each.mean, each.interval, each.percent) for each in numbers]
        if two:
            change = difference(metric, numbers[1])
            cells.append(_cell(change.mean, change.interval, metric.percent, "+"))
        lines.add_row(name, *cells)
    stream = io.StringIO()
    Console(file=stream, width=TABLE_WIDTH, color_system=None).print(lines, markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def comparison_summary(measured: Sequence[ModelResult]) -> dict[str, Any]:
    """Returns the numbers in `comparison_table` as JSON. Shares are from 0 to 1, and missing values
    are null.
    """
    measured = shared(measured)
    content: dict[str, Any] = {
        "problems": len(measured[0].indices),
        "models": {each.model: _numbers(each.metrics) for each in measured},
    }
    if len(measured) == 2:
        first, second = (each.metrics for each in measured)
        content["difference"] = _numbers(
            {name: difference(metric, second[name]) for name, metric in first.items()}
        )
    return content


def _numbers(metrics: dict[str, Metric]) -> dict[str, Any]:
    """Returns the means and intervals as JSON values."""
    return {
        name: {"mean": None if np.isnan(each.mean) else each.mean, "interval": each.interval}
        for name, each in metrics.items()
    }


def _cell(mean: float, interval: Interval | None, percent: bool, sign: str = "") -> str:
    def spell(value: float) -> str:
        if percent:
            return f"{100 * value:{sign}.1f} %"
        return f"{value:{sign}.3g}" if abs(value) < 1000 else f"{value:{sign},.0f}"

    return f"{spell(mean)} [{spell(interval.low)}, {spell(interval.high)}]" if interval else ""
