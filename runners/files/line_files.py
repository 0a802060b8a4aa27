"""Reading a run's files: another process may be writing or renaming them, and they may be foreign."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from runners.errors import UserError

_BLOCK = 1 << 22  # bytes read at a time
_LINES = 1024  # lines parsed at a time


def open_file(path: Path, *, follow: bool = False) -> BinaryIO:
    """The only way into a run's files: OSError for a link, and for what is not a regular file.

    A link could make a page out of any file of this machine; opening a fifo could wait for ever. With
    `follow` a link is allowed, as in the Hub's cache.
    """
    nofollow = 0 if follow else os.O_NOFOLLOW
    number = os.open(path, os.O_RDONLY | nofollow | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(number, "rb")


class LineFile:
    """The complete lines of a file, each returned once; text after the last line feed waits.

    If the file was cut, or another file has its name, reading starts over; `generation` counts that.
    """

    def __init__(self, path: Path, generation: int = 0) -> None:
        """The file need not exist yet."""
        self.path = path
        self.generation = generation
        self.bad = 0  # lines that are not JSON objects
        self._place = 0
        self._identity: tuple[int, int] | None = None

    def restarted(self) -> bool:
        """Whether the next `read` starts over. If it is called before each `read`, none is missed."""
        before = self.generation
        self.changed()
        return self.generation != before

    def changed(self) -> bool:
        """Whether there is something new to read; starts over if the file was replaced or cut."""
        try:
            found = os.lstat(self.path)
        except OSError:  # being renamed, or not there yet: what was read stays
            return False
        identity = (found.st_dev, found.st_ino)
        if self._identity is not None and (identity != self._identity or found.st_size < self._place):
            self.generation += 1
            self._place, self.bad = 0, 0
        self._identity = identity
        return found.st_size > self._place

    def read(self, wanted: Callable[[bytes], bool] | None = None) -> Iterator[dict[str, Any]]:
        """The objects of the new lines; if `wanted` is given, only of lines whose bytes it accepts.

        Lines that are not JSON objects are counted in `bad`. UserError if the file cannot be read.
        """
        if not self.changed():
            return
        try:
            with open_file(self.path) as stream:
                stream.seek(self._place)
                for lines in _blocks(stream):
                    self._place += sum(map(len, lines)) + len(lines)
                    yield from self._parsed(lines if wanted is None else list(filter(wanted, lines)))
        except FileNotFoundError:  # being renamed
            return
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _parsed(self, lines: list[bytes]) -> list[dict[str, Any]]:
        for start in range(0, len(lines), _LINES):
            part = lines[start : start + _LINES]
            try:  # all at once is much faster than one by one
                found = json.loads(b"[" + b",".join(part) + b"]")
                if len(found) == len(part) and all(type(each) is dict for each in found):
                    lines[start : start + _LINES] = found
                    continue
            except (ValueError, RecursionError):
                pass
            lines[start : start + _LINES] = [self._one(line) for line in part]
        return [found for found in lines if found is not None]  # pyright: ignore[reportReturnType]

    def _one(self, line: bytes) -> Any:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.bad += bool(line.strip())
            return None
        return found


def _blocks(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Whole lines without their line feeds, many at a time."""
    rest = b""
    while block := stream.read(_BLOCK):
        head, feed, tail = block.rpartition(b"\n")
        if not feed:
            rest += block
            continue
        yield (rest + head).split(b"\n")
        rest = tail
