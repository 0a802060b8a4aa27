"""Rows of local files (.jsonl, .json, .csv, .parquet), each with its place and its fault, if any.

The parsers are the standard library's and pyarrow's. Unlike the loaders of `datasets`, they report the bad
row and continue after it, they guess no types, and they leave no second copy of the file in a cache.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from runners.errors import UserError, did_you_mean, show
from runners.files.links import check_links

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_ROW = 1 << 24  # bytes of a row in a text file
MAX_COLUMNS = 10_000

# Data sets use different names for the validation split.
_ALIASES = {"validation": "valid", "val": "valid", "dev": "valid"}
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SHARD = re.compile(r"-\d+-of-\d+$")


@attrs.frozen
class RawRow:
    """One row as read: its place, its columns, and the fault that kept it from being read, if any."""

    place: str  # "FILE, line 3"
    values: dict[str, Any] = attrs.field(factory=dict)
    fault: str = ""


def split_name(split: str) -> str:
    """The common name of a split with several names: validation, val and dev become valid."""
    return _ALIASES.get(split, split)


def find_split(folder: Path, split: str, key: str) -> list[Path]:
    """The files of a folder that hold a split: ``train.jsonl``, or shards, ``train-00000-of-00002.parquet``.

    Raises UserError, with the config's `key` and the splits found, if there is none, and if a split is there
    twice: in two formats, or as a whole beside its shards.
    """
    found: dict[str, list[Path]] = {}
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"data.source {folder} cannot be read: {error.strerror or error}") from error
    for path in entries:
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            found.setdefault(split_name(_SHARD.sub("", path.stem)), []).append(path)
    paths = found.get(split_name(split), [])
    if not paths:
        raise UserError(
            f"{key} is {show(split)}, but {folder} holds {', '.join(found) or 'no data file'}; wanted "
            f"{split}.jsonl, .json, .csv or .parquet{did_you_mean(split, found)}"
        )
    kinds = {
        (_SHARD.sub("", path.stem), bool(_SHARD.search(path.stem)), path.suffix.lower()) for path in paths
    }
    if len(kinds) > 1:
        names = ", ".join(path.name for path in paths)
        raise UserError(f"{key} is {show(split)}, which {folder} holds more than once ({names}); wanted one")
    check_links(folder, paths)
    return paths


def read_file(path: Path) -> list[RawRow]:
    """Every row of a file in order, unreadable ones with their fault; blank lines are skipped.

    Raises UserError if the file as a whole cannot be read: an unknown suffix, text that is not UTF-8, JSON
    that is not a list of rows, a broken CSV or Parquet file, or one that would unpack to many times its size.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path} ends in {show(suffix)}; wanted {', '.join(SUFFIXES)}")
    try:
        if suffix == ".parquet":
            from runners.data.parquet_rows import parquet_rows  # pyarrow takes half a second to import

            return [RawRow(f"{path}, row {number}", *row) for number, row in enumerate(parquet_rows(path), 1)]
        if suffix == ".csv":
            return list(_csv_rows(path, _text(path)))
        # Many files of JSON lines are named .json; only a list starts with a bracket.
        if suffix == ".json" and _starts_with_bracket(path):
            return list(_json_rows(path, _text(path)))
        return list(_line_rows(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_utf8(path, line, data[error.start]) from error


def _not_utf8(path: Path, line: int, byte: int) -> UserError:
    return UserError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8")


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(1 << 16)
    return head.decode("utf-8-sig", "ignore").lstrip()[:1] == "["


def _line_rows(path: Path) -> Iterator[RawRow]:
    # Line by line, so that a line too long for a row is never in memory. In bytes only \n ends a line: U+2028
    # and similar characters are allowed inside a JSON string.
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_ROW + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(line) > MAX_ROW:
                while not line.endswith(b"\n") and (line := stream.readline(MAX_ROW)):
                    pass
                yield RawRow(place, fault=f"a line of more than {MAX_ROW:,} bytes; wanted fewer")
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
    for number, value in enumerate(values, 1):
        yield _as_row(f"{path}, row {number}", value)


def _as_row(place: str, value: Any) -> RawRow:
    if isinstance(value, dict):
        return RawRow(place, value)
    return RawRow(place, fault=f"{type(value).__name__} instead of an object with named fields")


def _csv_rows(path: Path, text: str) -> Iterator[RawRow]:
    reader = csv.reader(_csv_lines(path, text), strict=True)
    try:
        header = next(reader, [])
        if len(header) > MAX_COLUMNS:
            raise UserError(f"{path} has {len(header):,} columns, wanted {MAX_COLUMNS:,} at most")
        twice = [name for name, count in Counter(header).items() if count > 1]
        if twice:
            raise UserError(f"{path} has two columns named {show(twice[0])}")
        for cells in reader:
            place = f"{path}, line {reader.line_num}"
            if len(cells) == len(header):
                yield RawRow(place, dict(zip(header, cells, strict=True)))
            elif cells:
                yield RawRow(place, fault=f"{len(cells)} cells under a header of {len(header)}")
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not CSV: {error}") from error


def _csv_lines(path: Path, text: str) -> Iterator[str]:
    """The lines with their line breaks, which may be inside quotes."""
    for number, found in enumerate(_LINES.finditer(text), 1):
        if found.end() - found.start() > MAX_ROW:
            raise UserError(
                f"{path}, line {number}: a line of more than {MAX_ROW:,} characters; wanted fewer"
            )
        yield found[0]
