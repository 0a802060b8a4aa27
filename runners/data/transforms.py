"""`data.transform`: one's own function from a row, as it was read, to the row that is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.config.user_functions import resolve_function
from runners.data.row_files import RawRow
from runners.errors import error_line

Transform = Callable[[dict[str, Any]], Mapping[str, Any] | None]


def custom_transform(name: str, folders: Sequence[Path] = ()) -> Transform | None:
    """The function that `data.transform` names; None where it is empty. UserError as `resolve_function`."""
    return resolve_function(name, folders, key="data.transform", takes=("row",)) if name else None


def transformed(raw: RawRow, transform: Transform) -> RawRow | None:
    """The row that the function makes of a row; None where it leaves the row out.

    A row that could not be read is not given to it. What it raises, or returns that is no row, is a fault of
    the row.
    """
    if raw.fault:
        return raw
    source = getattr(getattr(transform, "__code__", None), "co_filename", None)
    try:
        values = transform(dict(raw.values))
    except Exception as error:  # of a function of the user's own: reported with the row's place
        return attrs.evolve(raw, fault=f"data.transform failed: {error_line(error, source)}")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        found = type(values).__name__
        return attrs.evolve(raw, fault=f"data.transform returned {found}; wanted a row (a dict) or None")
    return attrs.evolve(raw, values=dict(values))
