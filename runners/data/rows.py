"""The usable rows of a split, what became of the others, and `data.transform`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from runners.data.row_files import RawRow
from runners.errors import error_line, show

Transform = Callable[[dict[str, Any]], Mapping[str, Any] | None]


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


def transformed(raw: RawRow, transform: Transform) -> RawRow | None:
    """The result of the function for a row; None if it leaves the row out.

    A row that could not be read is not passed to it. If it raises, or returns something else than a row or
    None, that is a fault of the row.
    """
    if raw.fault:
        return raw
    source = getattr(getattr(transform, "__code__", None), "co_filename", None)
    fault = ""
    try:
        values = transform(dict(raw.values))
    except (Exception, SystemExit) as error:  # raised by the custom function: reported with the row's place
        return attrs.evolve(raw, fault=f"data.transform failed: {error_line(error, source)}")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        fault = f"data.transform: expected a row (a dict) or None, found {type(values).__name__}"
    elif other := next((name for name in values if not isinstance(name, str)), None):
        fault = f"data.transform: expected names of columns, found {show(other)}"
    return attrs.evolve(raw, values={} if fault else dict(values), fault=fault)
