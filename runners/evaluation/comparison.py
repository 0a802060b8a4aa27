"""Models' results on the same problems, as a table and as JSON; two of them are compared pair by pair."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from runners.evaluation.estimators import Interval, bootstrap, mcnemar, wilson

TABLE_WIDTH = 1000  # columns: tables are never folded


@attrs.frozen(eq=False)
class Metric:
    """One number for each problem, with their mean and interval."""

    values: np.ndarray  # float64; NaN for a problem without a value
    percent: bool = False  # shown as a percentage

    @property
    def mean(self) -> float:
        """The mean over the problems with a value; NaN without any."""
        known = self.values[~np.isnan(self.values)]
        return float(known.mean()) if known.size else float("nan")

    @property
    def interval(self) -> Interval | None:
        """95 %: Wilson's if each value is 0 or 1, else by resampling the problems; None without values."""
        known = self.values[~np.isnan(self.values)]
        if not known.size:
            return None
        if self.percent and set(known.tolist()) <= {0.0, 1.0}:
            return wilson(round(known.sum()), known.size)
        return bootstrap(known.tolist())


@attrs.frozen(eq=False)
class ModelResult:
    """One model on some problems."""

    model: str
    indices: tuple[int, ...]  # which rows of the data
    metrics: dict[str, Metric]  # name -> values in the order of `indices`
    completions: tuple[dict[str, Any], ...]  # JSON rows
    problems: tuple[str, ...]  # faults in scoring


class Difference(NamedTuple):
    """The second model's value minus the first's, on the problems of both."""

    mean: float
    interval: Interval  # 95 %, by resampling the pairs
    p: float | None  # of McNemar's exact test, if every value is right or wrong


def difference(first: Metric, second: Metric) -> Difference | None:
    """The paired difference; None if no problem has both values.

    Both must be over the same problems in the same order (`shared` ensures this).
    """
    known = ~(np.isnan(first.values) | np.isnan(second.values))
    if not known.any():
        return None
    a, b = first.values[known], second.values[known]
    binary = first.percent and {*a.tolist(), *b.tolist()} <= {0.0, 1.0}
    p = mcnemar(int(np.sum(a > b)), int(np.sum(a < b))) if binary else None
    return Difference(float((b - a).mean()), bootstrap((b - a).tolist()), p)


def shared(measured: Sequence[ModelResult]) -> list[ModelResult]:
    """The models' results on the problems that all of them were given."""
    common = set.intersection(*(set(each.indices) for each in measured))

    def cut(each: ModelResult) -> ModelResult:
        places = [place for place, index in enumerate(each.indices) if index in common]
        metrics = {name: Metric(one.values[places], one.percent) for name, one in each.metrics.items()}
        return attrs.evolve(each, indices=tuple(each.indices[place] for place in places), metrics=metrics)

    return [cut(each) for each in measured]


def comparison_table(measured: Sequence[ModelResult]) -> str:
    """Markdown: a row for each number, a column for each model, and for two models the difference.

    In brackets the 95 % interval; p is that of McNemar's exact test.
    """
    measured = shared(measured)
    first = measured[0]
    headings = [f"{len(first.indices)} problems", *(each.model for each in measured)]
    two = len(measured) == 2
    lines = Table(*headings, *(["difference", "p"] if two else []), box=MARKDOWN)
    for name, metric in first.metrics.items():
        numbers = [each.metrics[name] for each in measured]
        cells = [_cell(each.mean, each.interval, each.percent) for each in numbers]
        if two:
            found = difference(*numbers)
            cells.append(_cell(found.mean, found.interval, metric.percent, "+") if found else "")
            cells.append("" if not found or found.p is None else f"{found.p:.3g}")
        lines.add_row(name, *cells)
    stream = io.StringIO()
    Console(file=stream, width=TABLE_WIDTH, color_system=None).print(lines, markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines() if line.strip())


def comparison_summary(measured: Sequence[ModelResult]) -> dict[str, Any]:
    """The same numbers for JSON: shares from 0 to 1, null for missing values."""
    measured = shared(measured)
    content: dict[str, Any] = {"problems": len(measured[0].indices), "models": {}}
    for each in measured:
        content["models"][each.model] = {
            name: {"mean": None if np.isnan(metric.mean) else metric.mean, "interval": metric.interval}
            for name, metric in each.metrics.items()
        }
    if len(measured) == 2:
        first, second = (each.metrics for each in measured)
        found = {name: difference(metric, second[name]) for name, metric in first.items()}
        content["difference"] = {name: each and each._asdict() for name, each in found.items()}
    return content


def _cell(mean: float, interval: Interval | None, percent: bool, sign: str = "") -> str:
    def spell(value: float) -> str:
        if percent:
            return f"{100 * value:{sign}.1f} %"
        return f"{value:{sign}.3g}" if abs(value) < 1000 else f"{value:{sign},.0f}"

    return f"{spell(mean)} [{spell(interval.low)}, {spell(interval.high)}]" if interval else ""
