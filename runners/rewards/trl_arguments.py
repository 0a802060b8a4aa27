"""TRL's further arguments of rewards: the progress of the run, and two ways to log.

Names, parameters and meaning are those of TRL's GRPOTrainer (`trainer_state`, `log_extra`, `log_metric`), so
that a function written for TRL runs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from runners.answers.values import value_text
from runners.metrics import METRICS


@attrs.frozen
class TrainerState:
    """The progress of a run: the part of transformers' TrainerState that has a meaning here."""

    global_step: int = 0  # optimizer updates taken
    max_steps: int = 0  # optimizer updates of the whole run
    epoch: float = 0.0  # epochs done, with fractions
    num_train_epochs: int = 0


NO_RUN = TrainerState()
"""The state that rewards get outside a run."""


@attrs.frozen(eq=False)
class RewardLog:
    """The texts and numbers that rewards have logged in one call of the scorer."""

    size: int  # completions
    extras: dict[str, list[Any]] = attrs.field(factory=dict)  # column -> an entry per completion
    metrics: dict[str, list[float]] = attrs.field(factory=dict)  # name -> each value that was logged

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column for completions.jsonl. Raises ValueError unless it has an entry for each completion."""
        if len(values) != self.size:
            raise ValueError(f"log_extra({column!r}, …) got {len(values)} values for {self.size} completions")
        self.extras[column] = [_plain(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """A number for training_log.jsonl, which gets the mean of an update's values. Raises ValueError for a
        name of the log's own."""
        if name in METRICS:
            raise ValueError(f"log_metric: {name} is a name of the log's own; call it something else")
        self.metrics.setdefault(name, []).append(float(value))

    def add(self, found: Mapping[str, Any]) -> None:
        """What a call of one reward has logged."""
        self.extras.update(found["extras"])
        for name, values in found["metrics"].items():
            self.metrics.setdefault(name, []).extend(values)


def _plain(value: Any) -> Any:
    """The value as one of JSON's types; of a list each entry, as in the rewards of turns."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    return value if value is None or isinstance(value, bool | int | float | str) else value_text(value)
