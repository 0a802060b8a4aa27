"""What TRL hands to a reward beside completions and columns: how far the run is, and two ways to log.

Names, parameters and meaning are those of TRL's GRPOTrainer (`trainer_state`, `log_extra`, `log_metric`), so
that a function written for it runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs


@attrs.frozen
class TrainerState:
    """How far a run is: the part of transformers' TrainerState that has a meaning here."""

    global_step: int = 0  # optimizer updates taken
    max_steps: int = 0  # optimizer updates of the whole run
    epoch: float = 0.0  # epochs gone through, with fractions
    num_train_epochs: int = 0


NO_RUN = TrainerState()
"""What rewards are told outside a run."""


@attrs.frozen(eq=False)
class RewardLog:
    """What the rewards of one call to the scorer want to see in the logs."""

    size: int  # completions
    extras: dict[str, list[Any]] = attrs.field(factory=dict)  # column -> an entry per completion
    metrics: dict[str, list[float]] = attrs.field(factory=dict)  # name -> each value that was logged

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """A column for completions.jsonl. Raises ValueError unless it has an entry for each completion."""
        if len(values) != self.size:
            raise ValueError(f"log_extra({column!r}, …) got {len(values)} values for {self.size} completions")
        self.extras[column] = [_plain(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """A number for training_log.jsonl, which gets the mean of an update's values."""
        self.metrics.setdefault(name, []).append(float(value))


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
