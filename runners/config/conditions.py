"""The conditions of `stop.when`, such as "kl > 0.5 for 20"."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable

import attrs

from runners.config.sections import judge_of
from runners.errors import nearest
from runners.metrics import COMPARABLE

JUDGE_METRICS = (
    "requests",
    "cached",
    "failed",
    "latency",
    "slowest",
    "tokens_in",
    "tokens_out",
    "cost",
    "total_cost",
)
"""What a judge logs, as `judge/NAME/…`."""


CONDITION_FORM = '"METRIC < NUMBER" or "METRIC < NUMBER for READINGS", with <, <=, > or >='


_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_CONDITION = re.compile(
    r"\s*(?P<metric>[^\s<>=]+)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>[^\s<>=]+)(\s+for\s+(?P<readings>\d{1,9}))?\s*"
)


@attrs.frozen
class Condition:
    """Ends a run when a metric has been on one side of a limit for some readings in a row."""

    metric: str
    sign: str
    limit: float
    readings: int = 1

    @classmethod
    def parse(cls, text: str) -> Condition | None:
        """The condition in a text such as "kl > 0.5 for 20"; None if it cannot be read."""
        found = _CONDITION.fullmatch(text)
        if not found:
            return None
        try:
            limit = float(found["limit"])
        except ValueError:
            return None
        readings = int(found["readings"] or 1)
        return (
            cls(found["metric"], found["sign"], limit, readings)
            if readings and math.isfinite(limit)
            else None
        )

    def holds(self, value: float) -> bool:
        """Whether one reading meets the condition."""
        return _SIGNS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


def unknown_metric(metric: str, rewards: Iterable[str]) -> str | None:
    """None if the metric is known. Otherwise the name to write instead, or "" if none is near.

    `rewards` are the config's reward.functions.
    """
    names = {spelling for name in rewards for spelling in (name, name.rpartition(":")[2])}
    judged = [
        f"judge/{judge}/{part}" for name in rewards if (judge := judge_of(name)) for part in JUDGE_METRICS
    ]
    known = [
        *COMPARABLE,
        *judged,
        *(f"rewards/{name}/{part}" for name in sorted(names) for part in ("mean", "std")),
    ]
    if metric in known:
        return None
    return nearest(metric, known) or ""
