"""Rows of a Parquet file, with a limit on what a small file may unpack to.

A repeated string costs such a file almost nothing: any row may be as large as all that its row group stores.
So no more rows are read together than fit into the limit even then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from runners.errors import UserError, first_line, show

LEAST, RATIO = 1 << 26, 64  # bytes that any file may unpack to; larger files: so many times their own size
_CELL = 16  # bytes that any value takes in addition
_UNFIT = (ValueError, OverflowError)  # text that is not UTF-8, dates that Python cannot hold
_NARROW = {"halffloat": np.float16, "float": np.float32}


def parquet_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row's values, and the fault that kept it from being read, if any.

    Raises UserError if the file is not Parquet, or unpacks to more than RATIO times its size.
    """
    try:
        names = pyarrow.parquet.read_schema(path).names
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"{path} has two columns named {show(twice[0])}")
        for batch in _bounded_batches(path):
            yield from table_rows(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path} is not a Parquet file: {' '.join(str(error).split())}") from error


def table_rows(table: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row of an Arrow table or batch, and the fault that kept it from being read, if any."""
    narrow = {field.name: _NARROW[str(field.type)] for field in table.schema if str(field.type) in _NARROW}
    try:
        rows = table.to_pylist()
    except _UNFIT as error:
        if table.num_rows == 1:
            yield {}, first_line(error)
        for number in range(table.num_rows if table.num_rows > 1 else 0):
            yield from table_rows(table.slice(number, 1))
        return
    for row in rows:
        for name, kind in narrow.items():  # the float32 0.1 becomes 0.1, not 0.10000000149011612
            row[name] = None if row[name] is None else float(str(kind(row[name])))
        yield row, ""


def _bounded_batches(path: Path) -> Iterator[Any]:
    """The file's rows in batches. Raises UserError once they are too large for the file."""
    size, metadata = path.stat().st_size, pyarrow.parquet.read_metadata(path)
    most = max(LEAST, RATIO * size)
    too_large = UserError(
        f"{path}: expected {size:,} bytes to unpack to at most {most:,}, found more: it repeats itself"
    )
    stored = []  # bytes of each row group, before repeated strings are repeated
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        chunks = [group.column(column) for column in range(group.num_columns)]
        stored.append(sum(each.total_uncompressed_size + _CELL * each.num_values for each in chunks))
    if sum(stored) > most:
        raise too_large
    taken = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for number, each in enumerate(stored):
            for batch in file.iter_batches(max(most // max(each, 1), 1), [number]):
                taken += batch.nbytes
                if taken > most:
                    raise too_large
                yield batch
