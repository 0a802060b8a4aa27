"""Files with one JSON object a line: written so that no line is lost, read while another process writes."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runners.errors import UserError
from runners.files.json_files import open_file, to_json


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
        if keep is None and path.exists() and path.stat().st_size:
            os.replace(path, path.with_suffix(".previous.jsonl"))
        elif keep is not None and path.exists():
            os.truncate(path, _whole_lines(path, keep))
        self.path = path
        self.fault: OSError | None = None
        self._waiting = b""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.written = os.fstat(self._file).st_size  # bytes; only whole lines if no line waits

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record (see `to_json`)."""
        line, _ = to_json(record)
        # A lone surrogate in a completion turns into its JSON escape instead of an error.
        self._waiting += line.encode("utf-8", "backslashreplace") + b"\n"
        self.push()

    def push(self) -> None:
        """Writes the waiting lines, as far as the disk allows."""
        self.fault = None
        try:
            while self._waiting:
                count = os.write(self._file, self._waiting)
                self.written += count
                self._waiting = self._waiting[count:]
        except OSError as error:
            self.fault = error

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards. A file that was deleted is a fault."""
        self.push()
        if self.fault is None and not os.fstat(self._file).st_nlink:
            self.fault = OSError(errno.ENOENT, "it was deleted while the run wrote it")
        os.close(self._file)


class LineFile:
    """The complete lines of a file; text after the last line feed is none yet."""

    def __init__(self, path: Path) -> None:
        """The file need not exist."""
        self.path = path
        self.bad = 0  # lines of the last `read` that are not JSON objects

    def read(self, wanted: Callable[[bytes], bool] | None = None) -> Iterator[dict[str, Any]]:
        """The objects of the lines; if `wanted` is given, only of lines whose bytes it accepts.

        UserError if the file cannot be read.
        """
        self.bad = 0
        try:
            with open_file(self.path) as stream:
                for line in stream:
                    if line.endswith(b"\n") and line.strip() and (wanted is None or wanted(line)):
                        yield from self._object(line)
        except FileNotFoundError:  # perhaps being renamed
            return
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _object(self, line: bytes) -> Iterator[dict[str, Any]]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            yield found
        else:
            self.bad += 1


def _whole_lines(path: Path, most: int) -> int:
    """The bytes of the whole lines within a file's first `most` bytes."""
    if not path.stat().st_size:
        return 0
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n", 0, most) + 1
