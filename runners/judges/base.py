"""What every judge is, besides a function that is called like a reward; and its numbers in the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runners.config.conditions import JUDGE_METRICS


class Judge:
    """A model that rewards completions."""

    if TYPE_CHECKING:
        __call__: Callable[..., Any]
    grouped = False  # whether it takes the number of completions of a prompt, as `group_size`

    def check(self) -> None:
        """Raises UserError if it cannot judge: no server, no weights, no key."""

    def take_notices(self) -> list[str]:
        """Lines on faults besides the verdicts, each once."""
        return []


def combined(name: str, values: Sequence[float]) -> float | None:
    """One number for an update from those of its batch steps; None if the name is not a judge's."""
    group, _, rest = name.partition("/")
    rule = JUDGE_METRICS.get(rest.rpartition("/")[2]) if group == "judge" and "/" in rest else None
    return None if rule is None or not values else float(rule(values))
