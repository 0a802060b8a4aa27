"""Pointing out a reward that gives every completion the same: it teaches nothing, and is seldom meant."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

BATCH_STEPS = 10


@attrs.define(eq=False)
class ConstantRewards:
    """Watches the first batch steps of a run, and then speaks once."""

    names: Sequence[str]
    after: int = BATCH_STEPS
    _read: list[np.ndarray] = attrs.field(factory=list, init=False)  # [K, B] of each batch step so far

    def read(self, values_kb: np.ndarray) -> list[str]:
        """A line for each reward without a second value, at batch step number `after`; else none.

        `values_kb` holds the values that the rewards gave at a batch step, NaN for none.
        """
        if len(self._read) >= self.after:
            return []
        self._read.append(values_kb)
        if len(self._read) < self.after:
            return []
        seen_kb = np.concatenate(self._read, axis=1)
        self._read = [seen_kb[:, :0]] * self.after
        lines = (self._line(name, values_b) for name, values_b in zip(self.names, seen_kb, strict=True))
        return [line for line in lines if line]

    def _line(self, name: str, values_b: np.ndarray) -> str:
        given = values_b[~np.isnan(values_b)]
        to_all = f"of {len(values_b):,} completions in the first {self.after} batch steps"
        if not given.size:
            return f"reward {name} had nothing to say (None) about any {to_all}; check the columns it reads"
        if np.any(given != given[0]):
            return ""
        return (
            f"reward {name} gave {given[0]:g} to each {to_all} and so teaches nothing; check what it looks "
            "for in completions.jsonl, and what it gives a right answer with `grpo check`"
        )
