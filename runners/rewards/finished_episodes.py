"""The data of a rollout's finished conversations, for rewards, the log and the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np

from runners.data.messages import Message

COUNTS = ("turns", "calls", "failures", "timeouts", "cut")
"""What is counted of a conversation; "cut" are shortened results."""


@attrs.frozen(eq=False)
class FinishedEpisodes:
    """The data of a rollout's finished episodes, row by row."""

    messages: tuple[tuple[Message, ...], ...]  # after the prompt, in TRL's form for rewards
    environments: tuple[Any, ...]
    counted: tuple[Mapping[str, int], ...]  # by the names of `COUNTS`
    faults: tuple[str, ...]  # why a row has no reward; empty: it has one
    sampled: tuple[tuple[int, ...], ...]  # each row's sampled tokens
    seconds: tuple[float, ...]  # of its calls

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """Each count of all rows, int64 [B]."""
        return {name: np.array([row[name] for row in self.counted], np.int64) for name in COUNTS}

    def rows(self, index: Sequence[int]) -> FinishedEpisodes:
        """The data of only these rows."""
        return FinishedEpisodes(*(tuple(column[i] for i in index) for column in self._columns))

    @classmethod
    def concatenated(cls, parts: Sequence[FinishedEpisodes]) -> FinishedEpisodes:
        """One after another."""
        return cls(
            *(tuple(chain(*columns)) for columns in zip(*(part._columns for part in parts), strict=True))
        )

    @property
    def _columns(self) -> tuple[tuple[Any, ...], ...]:
        return attrs.astuple(self, recurse=False)

    @property
    def problems(self) -> list[str]:
        """A line for each kind of fault."""
        found = [fault for fault in self.faults if fault]
        return [
            f"environment: {fault}" + (f" ({found.count(fault)} times)" if found.count(fault) > 1 else "")
            for fault in dict.fromkeys(found)
        ]
