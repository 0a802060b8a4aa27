"""Rows of local files (.jsonl, .json, .csv, .parquet), each with its place and its fault, if any.

The parsers are the standard library's and pyarrow's. Unlike the loaders of `datasets`, they report the bad
row and continue after it, they guess no types, and they leave no second copy of the file in a cache.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from runners.errors import UserError, did_you_mean, error_line, show
from runners.files.links import check_links

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_ROW = 1 << 24  # bytes of a row
_LARGEST_CELL = (1 << 31) - 1  # characters: rows are measured when they are read
MAX_COLUMNS = 10_000
Transform = Callable[[dict[str, Any]], Mapping[str, Any] | None]
_TOO_LARGE = f"expected at most {MAX_ROW:,} bytes a row, found more"

# Data sets use different names for the validation split.
_ALIASES = {"validation": "valid", "val": "valid", "dev": "valid"}
_SHARD = re.compile(r"-(\d+)-of-(\d+)(-[0-9a-f]{16})?$")  # older ones of the Hub have a digest at the end


@attrs.frozen
class RawRow:
    """One row as read: its place, its columns, and the fault that kept it from being read, if any."""

    place: str  # "FILE, line 3"
    values: dict[str, Any] = attrs.field(factory=dict)
    fault: str = ""

    def sized(self) -> RawRow:
        """The row, with a fault if it is larger than MAX_ROW; the bytes of images do not count."""
        return self if self.fault or _size(self.values) <= MAX_ROW else RawRow(self.place, fault=_TOO_LARGE)


def split_name(split: str) -> str:
    """The common name of a split with several names: validation, val and dev become valid."""
    return _ALIASES.get(split, split)


def find_split(folder: Path, split: str, key: str) -> list[Path]:
    """The files of a folder that hold a split: ``train.jsonl``, or shards, ``train-00000-of-00002.parquet``.

    Without data files in the folder itself, those of its folder ``data`` count, as in the Hub's repositories.

    Raises UserError, with the config's `key` and the splits found, if there is none; if a split is there
    twice, in two formats or as a whole beside its shards; and if a shard is missing.
    """
    found: dict[str, list[Path]] = {}
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"data.source {folder} cannot be read: {error.strerror or error}") from error
    for path in entries:
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            found.setdefault(split_name(_SHARD.sub("", path.stem)), []).append(path)
    if not found and (folder / "data").is_dir():
        return find_split(folder / "data", split, key)
    if split_name(split) not in found:
        only = f'; "{next(iter(found))}" for both splits holds out a tenth' if len(found) == 1 else ""
        raise UserError(
            f"{key}: expected {split}.jsonl, .json, .csv or .parquet in {folder}, found "
            f"{', '.join(found) or 'no data file'}{did_you_mean(split, found) or only}"
        )
    shards = {path: _SHARD.search(path.stem) for path in found[split_name(split)]}
    numbers = {path: int(shard[1]) if shard else 0 for path, shard in shards.items()}
    totals = {(path.suffix.lower(), shard and shard[2]) for path, shard in shards.items()}
    if len(totals) > 1 or len(set(numbers.values())) < len(shards):
        names = ", ".join(path.name for path in shards)
        raise UserError(f"{key}: expected the split {show(split)} once in {folder}, found {names}")
    total = next(iter(totals))[1]
    if total and len(shards) < int(total):
        raise UserError(
            f"{key}: expected {int(total)} shards of {show(split)} in {folder}, found {len(shards)}"
        )
    check_links(folder, list(shards))
    return sorted(shards, key=numbers.__getitem__)


def read_file(path: Path) -> list[RawRow]:
    """Every row of a file in order, unreadable ones with their fault; blank lines are skipped.

    Raises UserError if the file as a whole cannot be read: an unknown suffix, text that is not UTF-8, JSON
    that is not a list of rows, a broken CSV or Parquet file, or one that would unpack to many times its size.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: expected one of {', '.join(SUFFIXES)}, found {show(suffix)}")
    try:
        if suffix == ".parquet":
            from runners.data.parquet_rows import parquet_rows

            rows = enumerate(parquet_rows(path), 1)
            return [RawRow(f"{path}, row {number}", *row).sized() for number, row in rows]
        if suffix == ".csv":
            return [row.sized() for row in _csv_rows(path, _text(path))]
        if suffix == ".json" and _starts_with_bracket(path):
            return [row.sized() for row in _json_rows(path, _text(path))]
        return list(_line_rows(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if 4 * len(value) <= MAX_ROW else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(map(_size, value)) + sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data.count(b"\n", 0, error.start) + 1, data[error.start]) from error


def _not_utf8(path: Path, line: int, byte: int) -> UserError:
    return UserError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8")


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(1 << 16).decode("utf-8-sig", "ignore").lstrip()[:1] == "["


def _line_rows(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as stream:  # in bytes only \n ends a line: JSON strings may contain U+2028
        for number, line in enumerate(stream, 1):
            place = f"{path}, line {number}"
            if len(line) > MAX_ROW:
                yield RawRow(place, fault=_TOO_LARGE)
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, line[error.start]) from error
            if text.strip():
                yield _json_row(place, text.removesuffix("\n"))


def _json_row(place: str, line: str) -> RawRow:
    try:
        return _as_row(place, json.loads(line))
    except json.JSONDecodeError as error:
        return RawRow(place, fault=f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        return RawRow(place, fault=f"not usable JSON: {error}")


def _json_rows(path: Path, text: str) -> Iterator[RawRow]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return (_as_row(f"{path}, row {number}", value) for number, value in enumerate(values, 1))


def _as_row(place: str, value: Any) -> RawRow:
    if isinstance(value, dict):
        return RawRow(place, value)
    return RawRow(place, fault=f"expected an object with named fields, found {type(value).__name__}")


def _csv_rows(path: Path, text: str) -> Iterator[RawRow]:
    csv.field_size_limit(_LARGEST_CELL)  # by default 131,072 characters
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = filter(None, reader)
        header = _checked_header(path, next(lines, []))
        for cells in lines:
            place = f"{path}, line {reader.line_num}"
            if len(cells) == len(header):
                yield RawRow(place, dict(zip(header, cells, strict=True)))
            else:
                fault = f"expected {len(header)} cells, as in the header, found {len(cells)}"
                yield RawRow(place, fault=fault)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not CSV: {error}") from error


def _checked_header(path: Path, names: list[str]) -> list[str]:
    if len(names) > MAX_COLUMNS:
        raise UserError(f"{path}: expected at most {MAX_COLUMNS:,} columns, found {len(names):,}")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{path} has two columns named {show(twice[0])}")
    return names


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
