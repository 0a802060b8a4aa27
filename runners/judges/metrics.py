"""The numbers that a judge adds to the log, and how several batch steps are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_GROUP = "judge"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_RULES: dict[str, Callable[[Sequence[float]], float]] = {
    "requests": sum,  # sent requests, counting each try
    "cached": sum,  # completions whose answer was known: from the cache, or from an equal completion
    "failed": sum,  # completions without a verdict
    "latency": _mean,  # seconds of an answered request
    "slowest": max,  # seconds
    "tokens_in": sum,
    "tokens_out": sum,
    "cost": sum,
    "total_cost": max,  # of this process
}


def metric_name(judge: str, part: str) -> str:
    """The name in the log."""
    return f"{_GROUP}/{judge}/{part}"


def combined(name: str, values: Sequence[float]) -> float | None:
    """One number for an update from those of its batch steps; None if the name is not a judge's."""
    group, _, rest = name.partition("/")
    rule = _RULES.get(rest.rpartition("/")[2]) if group == _GROUP and "/" in rest else None
    return None if rule is None or not values else float(rule(values))
