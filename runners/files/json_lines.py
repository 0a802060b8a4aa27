"""Files with one JSON object per line: values that JSON lacks are refused or named, and no line is lost."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Characters that end a line for str.splitlines, and so for some readers of JSON lines; and control characters
# that JSON does not escape, because such files are shown on terminals.
_SPELT = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def to_json(record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """One JSON object on one line, and the names of its numbers that are not finite.

    Such numbers become null, because JSON has no NaN, and an extra key "nonfinite" lists their names (dotted
    if nested). 0-d arrays become numbers. Raises TypeError, with the name, for a value that JSON cannot hold.
    """
    nonfinite: list[str] = []
    plain = {str(key): plain_value(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json_line(plain), nonfinite


def json_line(record: Mapping[str, Any]) -> str:
    """A record as a JSON object on one line, without control characters.

    Raises ValueError for a number that is not finite, TypeError for a value that JSON cannot hold.
    """
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_SPELT)


def plain_value(value: Any, name: str, nonfinite: list[str]) -> Any:
    """A value in JSON's types; adds the dotted names of numbers that become null to `nonfinite`."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(name)
        return None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(part, f"{name}.{key}", nonfinite) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part, f"{name}.{i}", nonfinite) for i, part in enumerate(value)]
    raise TypeError(f"{name}: a {type(value).__name__} cannot be written as JSON")


class JsonLines:
    """A file with one JSON object per line; each line is written at once.

    A line that cannot be written is kept in memory and written before the next one. So no line is lost or
    split while the process lives. `fault` is the reason for such a line, or None.
    """

    def __init__(self, path: Path, *, keep: int | None = None):
        """Opens `path`; OSError if that fails.

        Args:
            path: the file; its folder is made.
            keep: None renames an older file to `NAME.previous.jsonl`. A number continues it: after so many
                bytes, or after its last whole line if it is shorter.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is not None:
            _cut(path, keep)
        elif path.exists() and path.stat().st_size:
            os.replace(path, path.with_suffix(".previous.jsonl"))
        self.path = path
        self.fault: OSError | None = None
        self._waiting = b""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.written = os.fstat(self._file).st_size  # bytes; only whole lines if no line waits

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record (see `to_json`)."""
        line, _ = to_json(record)
        # A lone surrogate in a completion turns into its JSON escape instead of an error.
        self._waiting += line.encode("utf-8", "backslashreplace") + b"\n"
        self.push()

    def push(self) -> None:
        """Writes the waiting lines, as far as the disk allows."""
        try:
            while self._waiting:
                count = os.write(self._file, self._waiting)
                self.written += count
                self._waiting = self._waiting[count:]
        except OSError as error:
            self.fault = error
        else:
            self.fault = None

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards. A file that was deleted is a fault."""
        self.push()
        if self.fault is None and not os.fstat(self._file).st_nlink:
            self.fault = OSError(errno.ENOENT, "it was deleted while the run wrote it")
        os.close(self._file)


def _cut(path: Path, most: int) -> None:
    """Cuts a file, if it exists, to the whole lines within its first `most` bytes."""
    if not path.exists():
        return
    with open(path, "r+b") as stream:
        end = 0
        if most and path.stat().st_size:  # an empty file cannot be mapped
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n", 0, most) + 1
        stream.truncate(end)
        os.fsync(stream.fileno())
