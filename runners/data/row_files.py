"""Reads rows of local files (.jsonl, .json, .csv, .parquet), each with its location and its error,
if any.

The parsers are the standard library's and pyarrow's. Unlike the loaders of `datasets`, they report
an invalid row and continue, do not guess types, and leave no copy of the file in a cache.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runners.errors import UserError, did_you_mean, error_line, show, user_errors
from runners.files.durable import disk_errors

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
Transform = Callable[[dict[str, Any]], Mapping[str, Any] | None]

# Data sets use different names for the validation split.
_ALIASES = {"validation": "valid", "val": "valid", "dev": "valid"}
# Older shards on the Hub end with a digest.
_SHARD = re.compile(r"-(\d+)-of-(\d+)(-[0-9a-f]{16})?$")
LEAST = 1 << 26  # bytes that every file may unpack to
RATIO = 64  # larger files may unpack to this many times their own size
_DEPTH = 100  # maximum nesting of lists and objects
_CELL = 16  # additional bytes per value
_NARROW = {"halffloat": np.float16, "float": np.float32}


class Row(dict[str, Any]):
    """A row's columns, its location in the data, and its read error, if any."""

    def __init__(self, values: Mapping[str, Any], place: str, fault: str = "") -> None:
        super().__init__(values)
        self.place = place  # "FILE, line 3"
        self.fault = fault


class Rows(list[Row]):
    """Usable rows with all their columns, and a record of skipped rows."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        super().__init__(rows)
        self.dropped = 0  # number of rows skipped by data.transform
        self.faults: dict[str, str] = {}  # invalid rows: location -> message

    def notices(self, split: str, too_long: int, limit: int) -> list[str]:
        """Returns messages about unused data: skipped rows, and `too_long` prompts with more than
        `limit` tokens.
        """
        first = next(iter(self.faults.values()), "")
        counts = (
            (self.dropped, "rows skipped by data.transform"),
            (len(self.faults), f"invalid rows skipped (the first: {first})"),
            (
                too_long,
                f"of {len(self)} prompts skipped, longer than data.max_prompt_length = {limit} "
                "tokens",
            ),
        )
        return [f"{split} data: {count} {what}" for count, what in counts if count]


def skip_row(place: str, fault: str, on_bad_row: str) -> str:
    """Returns a message about an invalid row. Raises it as a UserError if `on_bad_row` is
    "raise".
    """
    if on_bad_row == "raise":
        raise UserError(f'{place}: {fault} (data.on_bad_row = "skip" skips such rows)')
    return f"{place}: {fault}"


def split_name(split: str) -> str:
    """Returns one name for a split that has several: validation, val and dev become valid."""
    return _ALIASES.get(split, split)


def find_split(folder: Path, split: str, key: str) -> list[Path]:
    """Returns a split's files in a folder: ``train.jsonl``, or shards such as
    ``train-00000-of-00002.parquet``.

    If the folder contains no data files, its subfolder ``data`` is used, as in the Hub's
    repositories.

    Raises UserError, with the config's `key` and the files found, if there is no such file; if a
    split exists twice (in two formats, or both complete and as shards); or if a shard is missing.
    """
    found: dict[str, list[Path]] = {}
    with disk_errors(f"data.source {folder} cannot be read"):
        entries = sorted(folder.iterdir())
    for path in entries:
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            found.setdefault(split_name(_SHARD.sub("", path.stem)), []).append(path)
    if not found and (folder / "data").is_dir():
        return find_split(folder / "data", split, key)
    files = found.get(split_name(split))
    if files is None:
        only = (
            f'; "{next(iter(found))}" for both splits holds out a tenth' if len(found) == 1 else ""
        )
        raise UserError(
            f"{key}: expected {split}.jsonl, .json, .csv or .parquet in {folder}, found "
            f"{', '.join(found) or 'no data file'}{did_you_mean(split, found) or only}"
        )
    kinds = {(path.suffix.lower(), _shard(path)[1]) for path in files}
    if len(kinds) > 1 or len(files) != _shard(files[0])[1]:
        raise UserError(
            f"{key}: expected one complete copy of {show(split)} in {folder}, found "
            f"{', '.join(path.name for path in files)}"
        )
    return sorted(files, key=_shard)


def _shard(path: Path) -> tuple[int, int]:
    """Returns a shard's number and the number of shards, or (0, 1) for a complete file."""
    shard = _SHARD.search(path.stem)
    return (int(shard[1]), int(shard[2])) if shard else (0, 1)


def read_file(path: Path) -> list[Row]:
    """Returns every row of a file in order. Unreadable rows are included with their error; blank
    lines are skipped.

    Raises UserError if the file as a whole cannot be read: its suffix is unknown, its text is not
    UTF-8, its JSON is not a list of rows, the CSV or Parquet file is damaged, or the file would
    unpack to many times its size.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: expected one of {', '.join(SUFFIXES)}, found {show(suffix)}")
    try:
        with disk_errors(f"{path} cannot be read"):
            if suffix == ".parquet":
                rows = enumerate(_parquet_rows(path), 1)
                return [Row(values, f"{path}, row {number}") for number, values in rows]
            text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; save the "
            "file as UTF-8"
        ) from error
    if suffix == ".csv":
        return list(_csv_rows(path, text))
    if suffix == ".json" and text.lstrip()[:1] == "[":
        with user_errors(f"{path} is not JSON", ValueError, RecursionError):
            values = json.loads(text)
        return [_as_row(f"{path}, row {number}", value) for number, value in enumerate(values, 1)]
    # Not splitlines: JSON strings may contain U+2028.
    lines = enumerate(text.split("\n"), 1)
    return [_json_row(f"{path}, line {number}", line) for number, line in lines if line.strip()]


def _json_row(place: str, line: str) -> Row:
    try:
        return _as_row(place, json.loads(line))
    # an integer with thousands of digits, or thousands of brackets
    except (ValueError, RecursionError) as error:
        return Row({}, place, f"not JSON: {error}")


def _as_row(place: str, value: Any) -> Row:
    if _is_deep(value):
        return Row(
            {}, place, f"expected lists and objects nested at most {_DEPTH} deep, found deeper ones"
        )
    if isinstance(value, dict):
        return Row(value, place)
    return Row({}, place, f"expected an object with named fields, found {type(value).__name__}")


def _is_deep(value: Any, room: int = _DEPTH) -> bool:
    """Returns whether a value is nested more deeply than `room` lists and objects."""
    if room == 0:
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(_is_deep(each, room - 1) for each in value)


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(len(text))  # by default 131,072 characters
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = filter(None, reader)
        header = next(lines, [])
        if len(set(header)) < len(header):
            raise UserError(f"{path} has two columns with the same name")
        for cells in lines:
            place = f"{path}, line {reader.line_num}"
            if len(cells) == len(header):
                yield Row(dict(zip(header, cells, strict=True)), place)
            else:
                yield Row(
                    {}, place, f"expected {len(header)} cells, as in the header, found {len(cells)}"
                )
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not CSV: {error}") from error


def transformed(row: Row, transform: Transform | None) -> Row | None:
    """Returns the transform's result for a row, or None if the transform skips the row. Without a
    transform, the row is returned unchanged.

    The transform is not called with a row that could not be read. If the transform raises, or
    returns anything but a row or None, the row is invalid.
    """
    if transform is None or row.fault:
        return row
    source = getattr(getattr(transform, "__code__", None), "co_filename", None)
    try:
        values = transform(dict(row))
    # The user's function may raise anything.
    except (Exception, SystemExit) as error:
        return Row({}, row.place, f"data.transform failed: {error_line(error, source)}")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        fault = f"data.transform: expected a row (a dict) or None, found {type(values).__name__}"
        return Row({}, row.place, fault)
    return Row(values, row.place)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields each row's values.

    Raises UserError if the file is not Parquet, or unpacks to more than RATIO times its size. A
    repeated string takes almost no space in Parquet, so any single row may be as large as its whole
    row group. Even then, the number of rows read at once stays within the limit.
    """
    import pyarrow.parquet

    most = max(LEAST, RATIO * path.stat().st_size)
    unpacked = 0
    too_large = UserError(f"{path}: expected at most {most:,} bytes after unpacking, found more")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) < len(names):
                raise UserError(f"{path} has two columns with the same name")
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            chunks = [[group.column(n) for n in range(group.num_columns)] for group in groups]
            stored = [
                sum(c.total_uncompressed_size + _CELL * c.num_values for c in each)
                for each in chunks
            ]
            if sum(stored) > most:
                raise too_large
            for batch in file.iter_batches(most // max([1, *stored])):
                unpacked += batch.nbytes
                if unpacked > most:
                    raise too_large
                yield from table_rows(batch)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        # Also text that is not UTF-8, and dates that Python cannot hold.
        raise UserError(
            f"{path} is not a usable Parquet file: {' '.join(str(error).split())}"
        ) from error


def table_rows(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of an Arrow table or batch. A float32 0.1 becomes 0.1, not
    0.10000000149011612.
    """
    rows = table.to_pylist()
    for field in table.schema:
        kind = _NARROW.get(str(field.type))
        if kind:
            for row in rows:
                row[field.name] = row[field.name] and float(str(kind(row[field.name])))
    return rows
