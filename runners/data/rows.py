"""The usable rows of a split, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Row(dict[str, Any]):
    """A row's columns, with its place in the data: "FILE, line 3"."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        super().__init__(values)
        self.place = place


class Rows(list[Row]):
    """Usable rows with all their columns, the number of bad rows left out, and the fault of the first one."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self.skipped = 0
        self.dropped = 0  # by data.transform
        self.first_fault = ""
        self.refused: dict[str, str] = {}  # by a chat template or a tokenizer: place -> fault

    def notices(self, split: str, too_long: int, limit: int) -> list[str]:
        """Lines on unused data: left-out rows, and `too_long` prompts of more than `limit` tokens."""
        found = []
        if self.dropped:
            found.append(f"{split} data: {self.dropped} rows left out by data.transform")
        if bad := self.skipped + len(self.refused):
            first = self.first_fault or next(iter(self.refused.values()))
            found.append(f"{split} data: {bad} bad rows left out (the first: {first})")
        if too_long:
            found.append(
                f"{split} data: {too_long} of {len(self)} prompts left out, longer than "
                f"data.max_prompt_length = {limit} tokens"
            )
        return found
