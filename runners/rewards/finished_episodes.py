"""The data of a rollout's finished conversations, for rewards, the log and the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from runners.data.prompts import Message

COUNTS = (
    "turns",
    "calls",
    "failures",
    "timeouts",
    "cut",
)  # of a conversation; "cut" counts shortened results


@attrs.frozen(eq=False)
class FinishedEpisodes:
    """The data of a rollout's finished episodes, row by row."""

    messages: tuple[tuple[Message, ...], ...]  # after the prompt, in TRL's form for rewards
    environments: tuple[Any, ...]
    counts: Mapping[str, np.ndarray]  # int64 [B], by the names of `COUNTS`
    faults: tuple[str, ...]  # why a row has no reward; empty: it has one
    sampled: tuple[tuple[int, ...], ...]  # each row's sampled tokens
    seconds: tuple[float, ...]  # of its calls

    def rows(self, index: Sequence[int]) -> FinishedEpisodes:
        """The data of only these rows."""
        return FinishedEpisodes(
            tuple(self.messages[i] for i in index),
            tuple(self.environments[i] for i in index),
            {name: values[list(index)] for name, values in self.counts.items()},
            tuple(self.faults[i] for i in index),
            tuple(self.sampled[i] for i in index),
            tuple(self.seconds[i] for i in index),
        )

    @classmethod
    def concatenated(cls, parts: Sequence[FinishedEpisodes]) -> FinishedEpisodes:
        """One after another."""
        return cls(
            tuple(each for part in parts for each in part.messages),
            tuple(each for part in parts for each in part.environments),
            {name: np.concatenate([part.counts[name] for part in parts]) for name in COUNTS},
            tuple(each for part in parts for each in part.faults),
            tuple(each for part in parts for each in part.sampled),
            tuple(each for part in parts for each in part.seconds),
        )

    @property
    def problems(self) -> list[str]:
        """A line for each kind of fault."""
        found = [fault for fault in self.faults if fault]
        return [
            f"environment: {fault}" + (f" ({found.count(fault)} times)" if found.count(fault) > 1 else "")
            for fault in dict.fromkeys(found)
        ]
