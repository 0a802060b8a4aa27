"""Rows of a Parquet file, with a limit on what a small file may unpack to.

A repeated string costs such a file almost nothing, however long it is. So the size of the rows is computed
before they are made, from the file's dictionary: each string once, and its positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pyarrow.compute import call_function

from runners.data.value_text import widened
from runners.errors import UserError, first_line, show

LEAST, RATIO = 1 << 26, 64  # bytes that any file may unpack to; larger files: so many times their own size
_CELL = 16  # bytes that any value takes in addition
_TEXTS = ("STRING", "NONE", "JSON", "ENUM")  # types whose strings can be read as a dictionary
_DELTA = "DELTA_BYTE_ARRAY"  # an encoding in which each string may repeat the previous one
_UNFIT = (ValueError, OverflowError)  # text that is not UTF-8, dates that Python cannot hold


def parquet_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row's values, and the fault that kept it from being read, if any.

    Raises UserError if the file is not Parquet, or unpacks to more than RATIO times its size.
    """
    try:
        names = pyarrow.parquet.read_schema(path).names
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"{path} has two columns named {show(twice[0])}")
        _check_size(path)
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path} is not a Parquet file: {' '.join(str(error).split())}") from error
    return table_rows(table)


def table_rows(table: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row of an Arrow table, and the fault that kept it from being read, if any."""
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    try:
        rows = table.to_pylist()
    except _UNFIT as error:
        if table.num_rows == 1:
            yield {}, first_line(error)
        for number in range(table.num_rows if table.num_rows > 1 else 0):
            yield from table_rows(table.slice(number, 1))
    else:
        yield from ((widened(values, types), "") for values in rows)


def _check_size(path: Path) -> None:
    """Raises UserError for a file whose rows would be too large for its size."""
    size = path.stat().st_size
    most = max(LEAST, RATIO * size)
    metadata = pyarrow.parquet.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    taken = sum(chunk.total_uncompressed_size + _CELL * chunk.num_values for chunk in chunks)
    repeats = {} if taken > most else _repeating(metadata, groups)
    taken = 0 if repeats else taken
    once = [name for name, is_delta in repeats.items() if not is_delta]
    with pyarrow.parquet.ParquetFile(path, read_dictionary=once) as file:
        for name, is_delta in repeats.items():
            for batch in _batches(file, groups, name, most if is_delta else 0):
                taken += _nbytes(batch.column(0))
                if taken > most:
                    break
    if taken > most:
        raise UserError(
            f"{path}: expected {size:,} bytes to unpack to at most {most:,}, found more: it repeats itself"
        )


def _repeating(metadata: Any, groups: list[Any]) -> dict[str, bool]:
    """The columns in which one stored string may count for many values; True for the `_DELTA` encoding."""
    found = {}
    for number in range(metadata.num_columns):
        column = metadata.schema.column(number)
        chunks = [group.column(number) for group in groups]
        is_delta = any(_DELTA in chunk.encodings for chunk in chunks)
        is_text = column.physical_type == "BYTE_ARRAY" and column.logical_type.type in _TEXTS
        if is_text and (is_delta or any(chunk.has_dictionary_page for chunk in chunks)):
            found[column.path] = is_delta
    return found


def _batches(file: Any, groups: list[Any], name: str, most: int) -> Iterator[Any]:
    """A column, some rows at a time; with `_DELTA` so few that they stay within `most` bytes."""
    rows = max((group.num_rows for group in groups), default=1) or 1
    if most:  # each string may be as long as the whole column in the file
        chunks = (group.column(number) for group in groups for number in range(group.num_columns))
        rows = max(min(most // max(1, *(chunk.total_uncompressed_size for chunk in chunks)), rows), 1)
    if "." in name:  # strings in lists cannot be read as a dictionary across groups
        for number in range(len(groups)):
            yield from file.iter_batches(rows, [number], columns=[name])
    else:
        yield from file.iter_batches(rows, columns=[name])


def _nbytes(array: Any) -> int:
    """Bytes of an array's values; dictionary values count as often as they are used."""
    kind = array.type
    if isinstance(array, pyarrow.DictionaryArray):
        used = call_function("binary_length", [array.dictionary]).take(array.indices)
        return (call_function("sum", [used]).as_py() or 0) + _CELL * len(array)
    if pyarrow.types.is_map(kind):
        return _nbytes(array.keys) + _nbytes(array.items)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _nbytes(array.flatten())
    if pyarrow.types.is_struct(kind):
        return sum(map(_nbytes, array.flatten()))
    return array.nbytes
