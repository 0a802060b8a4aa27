"""Defines the conditions in `stop.when`, such as "kl > 0.5 for 20"."""

import math
import re
from collections.abc import Iterable
from typing import Self

import attrs

from runners.config.rules import SIGNS
from runners.errors import did_you_mean, show
from runners.metrics import COMPARABLE

_CONDITION = re.compile(
    r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"(?:\s+for\s+(\d{1,9}))?\s*"
)


@attrs.frozen
class Condition:
    """A condition that ends a run when a metric has been beyond a limit for several consecutive
    readings.
    """

    metric: str
    sign: str
    limit: float
    readings: int = 1

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parses a condition such as "kl > 0.5 for 20". Returns None if the text cannot be
        parsed.
        """
        found = _CONDITION.fullmatch(text)
        if not found:
            return None
        metric, sign, limit, readings = found.groups(default="1")
        condition = cls(metric, sign, float(limit), int(readings))
        return condition if condition.readings and math.isfinite(condition.limit) else None

    def holds(self, value: float) -> bool:
        """Returns whether one reading meets the condition."""
        return SIGNS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


def condition_fault(text: str, rewards: Iterable[str]) -> str:
    """Returns the error in an entry of `stop.when`, or "" if the entry can be parsed and its metric
    is logged.

    `rewards` are the config's reward.functions.
    """
    condition = Condition.parse(text)
    if condition is None:
        return (
            'expected "METRIC < NUMBER" or "METRIC < NUMBER for READINGS", with <, <=, > or >=, '
            f"found {show(text)}"
        )
    known = [*COMPARABLE]
    for name in rewards:
        for spelling in (name, name.rpartition(":")[2]):
            known += [f"rewards/{spelling}/mean", f"rewards/{spelling}/std"]
            known += [f"eval/rewards/{spelling}"]
    if condition.metric in known:
        return ""
    return (
        f"expected a metric such as em, reward, kl or entropy, found {show(text)}"
        f"{did_you_mean(condition.metric, known)}"
    )
