"""Warns of a reward that gives every completion the same value: nothing is learned from it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from runners.config import rules

BATCH_STEPS = 10


@attrs.frozen
class ConstantRewards:
    """What a run's first batch steps have shown; a part of its state."""

    steps: int = rules.key(0, "batch steps seen", ">= 0")
    completions: int = rules.key(0, "in them", ">= 0")
    first: dict[str, float] = attrs.field(factory=dict)  # the first value of each reward
    varied: tuple[str, ...] = ()  # rewards that gave more than one value

    def read(
        self, names: Sequence[str], values_kb: np.ndarray, after: int = BATCH_STEPS
    ) -> tuple[ConstantRewards, list[str]]:
        """With one batch step more; at number `after` a line for each reward that has given only one value.

        `values_kb` holds the values that the rewards gave at a batch step, NaN for none.
        """
        if self.steps >= after:
            return self, []
        first, varied = dict(self.first), set(self.varied)
        for name, values_b in zip(names, values_kb, strict=True):
            given = values_b[~np.isnan(values_b)].tolist()
            if given and any(value != first.setdefault(name, given[0]) for value in given):
                varied.add(name)
        seen = ConstantRewards(
            self.steps + 1, self.completions + values_kb.shape[1], first, tuple(sorted(varied))
        )
        lines = [seen._line(name) for name in names if name not in varied] if seen.steps == after else []
        return seen, lines

    def _line(self, name: str) -> str:
        to_all = f"of {self.completions:,} completions in the first {self.steps} batch steps"
        if name not in self.first:
            return f"reward {name} returned None for each {to_all}; check the columns it reads"
        return (
            f"reward {name} gave {self.first[name]:g} to each {to_all}, so nothing is learned from it; look "
            "at completions.jsonl, and see with `grpo check` what it gives a right answer"
        )
