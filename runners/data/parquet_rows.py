"""Rows of Parquet files and Arrow tables, with a limit on what a small file may unpack to.

A repeated string costs such a file almost nothing: any row may be as large as all that its row group stores.
So no more rows are read together than fit into the limit even then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from runners.errors import UserError

LEAST, RATIO = 1 << 26, 64  # bytes that any file may unpack to; larger files: so many times their own size
_CELL = 16  # bytes that any value takes in addition
_NARROW = {"halffloat": np.float16, "float": np.float32}


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Each row's values.

    Raises UserError if the file is not Parquet, or unpacks to more than RATIO times its size.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise UserError(f"{path} has two columns of one name")
            for batch in _bounded_batches(path, file):
                yield from table_rows(batch)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        # Also text that is not UTF-8, and dates that Python cannot hold.
        raise UserError(f"{path} is not a usable Parquet file: {' '.join(str(error).split())}") from error


def table_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Each row of an Arrow table or batch."""
    narrow = {field.name: _NARROW[str(field.type)] for field in table.schema if str(field.type) in _NARROW}
    for row in table.to_pylist():
        for name, kind in narrow.items():  # the float32 0.1 becomes 0.1, not 0.10000000149011612
            row[name] = None if row[name] is None else float(str(kind(row[name])))
        yield row


def _bounded_batches(path: Path, file: pyarrow.parquet.ParquetFile) -> Iterator[Any]:
    """The file's rows in batches. Raises UserError once they are too large for the file."""
    size = path.stat().st_size
    most = max(LEAST, RATIO * size)
    too_large = UserError(
        f"{path}: expected {size:,} bytes to unpack to at most {most:,}, found more: it repeats itself"
    )
    stored = []  # bytes of each row group, before repeated strings are repeated
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        chunks = [group.column(column) for column in range(group.num_columns)]
        stored.append(sum(each.total_uncompressed_size + _CELL * each.num_values for each in chunks))
    if sum(stored) > most:
        raise too_large
    taken = 0
    for number, each in enumerate(stored):
        for batch in file.iter_batches(max(most // max(each, 1), 1), [number]):
            taken += batch.nbytes
            if taken > most:
                raise too_large
            yield batch
