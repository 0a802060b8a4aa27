"""`data.transform`: a custom function from a row of the file to the row that is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.config.user_functions import resolve_function
from runners.data.row_files import RawRow
from runners.errors import error_line, show

Transform = Callable[[dict[str, Any]], Mapping[str, Any] | None]


def custom_transform(name: str, folders: Sequence[Path] = ()) -> Transform | None:
    """The function that `data.transform` names; None if it is empty. UserError as in `resolve_function`."""
    return resolve_function(name, folders, key="data.transform", takes=("row",)) if name else None


def transformed(raw: RawRow, transform: Transform) -> RawRow | None:
    """The result of the function for a row; None if it leaves the row out.

    A row that could not be read is not passed to it. If it raises, or returns something else than a row or
    None, that is a fault of the row.
    """
    if raw.fault:
        return raw
    source = getattr(getattr(transform, "__code__", None), "co_filename", None)
    try:
        values = transform(dict(raw.values))
    except (Exception, SystemExit) as error:  # raised by the custom function: reported with the row's place
        return attrs.evolve(raw, fault=f"data.transform failed: {error_line(error, source)}")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        found = type(values).__name__
        return attrs.evolve(raw, fault=f"data.transform: expected a row (a dict) or None, found {found}")
    if other := next((name for name in values if not isinstance(name, str)), None):
        return attrs.evolve(raw, fault=f"data.transform: expected names of columns, found {show(other)}")
    return attrs.evolve(raw, values=dict(values))
