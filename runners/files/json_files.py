"""Reads and writes JSON: values on one line, objects in untrusted files, and files with one object
per line.

Files with one object per line are written so that no line is lost, and can be read while another
process writes.
"""

import errno
import json
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from runners.errors import ESCAPED, UserError, user_errors
from runners.files.durable import disk_errors


def open_file(path: Path, *, follow: bool = False) -> BinaryIO:
    """Opens an untrusted file. Raises OSError for a link, and for anything that is not a regular
    file.

    A link could expose any file on this machine, and opening a fifo could block forever. With
    `follow`, a link is allowed, as in the Hub's cache.
    """
    nofollow = 0 if follow else os.O_NOFOLLOW
    number = os.open(path, os.O_RDONLY | nofollow | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(number, "rb")


def open_own(path: Path, flags: int) -> int:
    """Opens an existing or new file for writing.

    Raises OSError for a symbolic or hard link, and for anything that is not a regular file. In a
    folder that another user created, a link could point to any of this user's files.
    """
    number = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    facts = os.fstat(number)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(number)
        raise OSError(
            errno.EINVAL, "expected a regular file without symbolic or hard links", str(path)
        )
    return number


def read_json(file: Path) -> dict:
    """Reads the JSON object in a regular file. Raises UserError if the file contains no JSON
    object.
    """
    with (
        user_errors(f"{file}: cannot be read as JSON", OSError, ValueError, RecursionError),
        open_file(file, follow=True) as stream,
    ):
        content = json.loads(stream.read().decode("utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def write_json(file: Path, content: Mapping[str, Any], **form: Any) -> None:
    """Writes a JSON object with an indentation of two spaces. `form` contains additional arguments
    for json.dumps.
    """
    file.write_text(json.dumps(content, **{"indent": 2, **form}) + "\n", encoding="utf-8")


def finite_number(value: Any) -> float | None:
    """Returns a value from an untrusted file as a finite float, or None if it is not a finite
    number.
    """
    if type(value) is int and abs(value) < 1 << 1023:  # fits into float64
        return float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def whole_number(value: Any) -> int:
    """Returns a value from an untrusted file as a count, or 0 if it is not a count."""
    return value if type(value) is int and 0 < value < 2**63 else 0


def to_json(record: Mapping[str, Any]) -> str:
    """Encodes a record as one JSON object on one line. 0-d arrays become numbers.

    NaN and infinite numbers become null, because JSON cannot represent them. An extra key
    "nonfinite" lists their names (dotted if nested). Raises TypeError, with the name, for a value
    that JSON cannot represent.
    """
    nonfinite: list[str] = []
    plain = {str(key): plain_value(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json_line(plain)


def json_line(record: Mapping[str, Any]) -> str:
    """Encodes a record as a JSON object on one line, without control characters.

    Raises ValueError for a number that is not finite, and TypeError for a value that JSON cannot
    represent.
    """
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(ESCAPED)


def plain_value(value: Any, name: str, nonfinite: list[str]) -> Any:
    """Converts a value to JSON's types. The dotted names of numbers that become null are added to
    `nonfinite`.
    """
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
        return {
            str(key): plain_value(part, f"{name}.{key}", nonfinite) for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(part, f"{name}.{i}", nonfinite) for i, part in enumerate(value)]
    raise TypeError(f"{name}: a {type(value).__name__} cannot be written as JSON")


class JsonLines:
    """A file with one JSON object per line, in which each line is written immediately.

    A line that cannot be written is kept in memory and written before the next one, so no line is
    lost or split while the process runs. `fault` is the reason if a line could not be written,
    otherwise None.
    """

    def __init__(self, path: Path, *, keep: int | None = None):
        """Opens `path`. Raises OSError if that fails.

        Args:
            path: the file, whose folder is created.
            keep: None renames an older file to `NAME.previous.jsonl`. A number truncates the older
                file to its complete lines within this many bytes, and new lines are appended.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is None:
            set_aside(path)
        self.path = path
        self.fault: OSError | None = None
        self._waiting = b""
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND)
        if keep is not None:
            os.ftruncate(self._file, _whole_lines(path, keep))
        self.written = os.fstat(self._file).st_size  # bytes; complete lines unless one waits

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record (see `to_json`)."""
        # A lone surrogate in a completion becomes its JSON escape instead of raising an error.
        self._waiting += to_json(record).encode("utf-8", "backslashreplace") + b"\n"
        self.push()

    def push(self) -> None:
        """Writes as many of the waiting lines as possible."""
        self.fault = None
        try:
            while self._waiting:
                count = os.write(self._file, self._waiting)
                self.written += count
                self._waiting = self._waiting[count:]
        except OSError as error:
            self.fault = error

    def close(self) -> None:
        """Writes the waiting lines if possible, and closes the file. Nothing can be written
        afterwards.
        """
        self.push()
        os.close(self._file)


def set_aside(path: Path) -> None:
    """Renames a file that is not empty to `NAME.previous.jsonl`. Raises OSError if that fails."""
    if path.exists() and path.stat().st_size:
        os.replace(path, path.with_suffix(".previous.jsonl"))


def read_lines(path: Path, bad: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects in a file's complete lines. Text after the last line feed is ignored.

    A missing file yields no objects. `bad` receives the numbers of lines that are not JSON objects.
    Raises UserError if the file cannot be read.
    """
    with (
        disk_errors(f"{path}: cannot be read"),
        suppress(FileNotFoundError),
        open_file(path) as stream,
    ):
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n") or not line.strip():
                continue
            found = None
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
            if isinstance(found, dict):
                yield found
            elif bad is not None:
                bad.append(number)


def _whole_lines(path: Path, most: int) -> int:
    """Returns how many of a file's first `most` bytes are complete lines."""
    if not path.stat().st_size:
        return 0
    with (
        open(path, "rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.rfind(b"\n", 0, most) + 1
