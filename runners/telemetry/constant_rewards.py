"""Warns of a reward that gives every completion the same value: nothing is learned from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from runners.errors import UserError, count_in, show

BATCH_STEPS = 10
_FACTS = "constant_rewards"  # in trainer_state.json


@attrs.define(eq=False)
class ConstantRewards:
    """Watches a run's first batch steps, including those before a resume, and then warns once."""

    names: Sequence[str]
    after: int = BATCH_STEPS
    _steps: int = attrs.field(default=0, init=False)
    _completions: int = attrs.field(default=0, init=False)
    _first: dict[str, float] = attrs.field(factory=dict, init=False)  # the first value of each reward
    _varied: set[str] = attrs.field(factory=set, init=False)  # rewards that gave more than one value

    def read(self, values_kb: np.ndarray) -> list[str]:
        """At batch step number `after`, a line for each reward that has given only one value; else no lines.

        `values_kb` holds the values that the rewards gave at a batch step, NaN for none.
        """
        if self._steps >= self.after:
            return []
        self._steps += 1
        self._completions += values_kb.shape[1]
        for name, values_b in zip(self.names, values_kb, strict=True):
            given = values_b[~np.isnan(values_b)].tolist()
            if given and any(value != self._first.setdefault(name, given[0]) for value in given):
                self._varied.add(name)
        if self._steps < self.after:
            return []
        return [self._line(name) for name in self.names if name not in self._varied]

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        counts = {"steps": self._steps, "completions": self._completions}
        return {_FACTS: {**counts, "first": dict(self._first), "varied": sorted(self._varied)}}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's facts; an old checkpoint without them is past the first batch steps.

        Raises UserError if they are not what `facts` gave.
        """
        found = facts.get(_FACTS, {"steps": self.after})
        if not isinstance(found, dict):
            raise UserError(f"trainer_state.json: {_FACTS}: found {show(found)}, expected a JSON object")
        first, varied = found.get("first", {}), found.get("varied", [])
        numbers = isinstance(first, dict) and all(isinstance(value, int | float) for value in first.values())
        if not numbers or not isinstance(varied, list):
            raise UserError(f"trainer_state.json: {_FACTS}: found {show(found)}, expected what a run saves")
        self._steps, self._completions = count_in(found, "steps", 0), count_in(found, "completions", 0)
        self._first, self._varied = first, set(map(str, varied))

    def _line(self, name: str) -> str:
        to_all = f"of {self._completions:,} completions in the first {self.after} batch steps"
        if name not in self._first:
            return f"reward {name} returned None for each {to_all}; check the columns it reads"
        return (
            f"reward {name} gave {self._first[name]:g} to each {to_all}, so nothing is learned from it; look "
            "at completions.jsonl, and see with `grpo check` what it gives a right answer"
        )
