"""Evaluations as a table and as JSON; two models on the same problems side by side, pair by pair."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from runners.evaluation.estimators import Interval, bootstrap, mcnemar
from runners.evaluation.results import Metric, ModelResult

TABLE_WIDTH = 1000  # columns: tables are never folded


@attrs.frozen
class Difference:
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
        metrics = {
            name: attrs.evolve(metric, values=metric.values[places]) for name, metric in each.metrics.items()
        }
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
        cells = [_cell(each.metrics[name]) for each in measured]
        if two:
            found = difference(metric, measured[1].metrics[name])
            cells += [
                _difference(found, metric.percent),
                "" if not found or found.p is None else f"{found.p:.3g}",
            ]
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
            name: {"mean": _json(metric.mean), "interval": _ends(metric.interval)}
            for name, metric in each.metrics.items()
        }
    if any(each.seconds for each in measured):
        content["seconds"] = {each.model: each.seconds for each in measured}
    if len(measured) == 2:
        found = {
            name: difference(metric, measured[1].metrics[name])
            for name, metric in measured[0].metrics.items()
        }
        content["difference"] = {
            name: None if each is None else {"mean": each.mean, "interval": _ends(each.interval), "p": each.p}
            for name, each in found.items()
        }
    return content


def _cell(metric: Metric) -> str:
    interval = metric.interval
    if interval is None:
        return ""
    spell = _speller(metric.percent)
    return f"{spell(metric.mean)} [{spell(interval.low)}, {spell(interval.high)}]"


def _difference(found: Difference | None, percent: bool) -> str:
    if found is None:
        return ""
    spell = _speller(percent, sign="+")
    return f"{spell(found.mean)} [{spell(found.interval.low)}, {spell(found.interval.high)}]"


def _speller(percent: bool, sign: str = ""):
    if percent:
        return lambda value: f"{100 * value:{sign}.1f} %"
    return lambda value: f"{value:{sign}.3g}" if abs(value) < 1000 else f"{value:{sign},.0f}"


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _json(value: float) -> float | None:
    return None if np.isnan(value) else value
