"""What a measurement finds: a number for each problem and metric, and shares of right samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from runners.evaluation.estimators import Interval, bootstrap, pass_at_k, wilson


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
    seconds: float = 0.0  # of conversations with tools


def shares(succeeded: Sequence[int], num: int, ks: Sequence[int]) -> dict[str, Metric]:
    """pass@k for every k, from the number of succeeded samples of each problem, of `num`."""
    return {
        f"pass@{k}": Metric(np.array([pass_at_k(num, count, k) for count in succeeded]), percent=True)
        for k in ks
    }


def row_means(values: Any) -> np.ndarray:
    """Means of rows, ignoring NaN; NaN for a row without values."""
    array = np.asarray(values, np.float64)
    known = ~np.isnan(array)
    with np.errstate(invalid="ignore"):
        return np.where(known, array, 0.0).sum(axis=1) / known.sum(axis=1)
