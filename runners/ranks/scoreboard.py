"""A file that the ranks of one host share: who waits, who is stopped, who has ended and why, and who is gone.

Each rank has a slot in the file and holds a lock on it. The system releases the lock when the process ends,
however it ends. If another rank can take the lock, the rank is gone.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import tempfile
import time
from contextlib import suppress

_SLOT = 512  # bytes
_PULSE = struct.Struct("<dqq")  # time of the last beat, the signal that has come, the process's number
_PULSE_AT = _SLOT - _PULSE.size  # its position in a slot
_HEAD = struct.Struct("<BQ")  # state, collectives begun
WORKING, WAITING, ENDED = 0, 1, 2


class Scoreboard:
    """The slots of `size` ranks; `mine` is written, the others are read."""

    def __init__(self, path: str, size: int, mine: int) -> None:
        """Opens the file, which `create` made, and takes this rank's lock."""
        self._mine = mine
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._file, size * _SLOT)
        self._number = 0
        self.beat(0)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, mine * _SLOT)

    @staticmethod
    def create(size: int) -> str:
        """The path of a new file for `size` ranks. `remove` it when all have opened it."""
        number, path = tempfile.mkstemp(prefix="grpo-ranks-")
        os.ftruncate(number, size * _SLOT)
        os.close(number)
        return path

    @staticmethod
    def remove(path: str) -> None:
        """Removes the file's name; processes that have it open keep it."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def beat(self, asked: int) -> None:
        """Shows that this process runs, and the signal that has come to it; 0: none."""
        _PULSE.pack_into(self._map, self._mine * _SLOT + _PULSE_AT, time.monotonic(), asked, os.getpid())

    def pulse(self, rank: int) -> tuple[float, int, int]:
        """Seconds since a rank's last beat, the signal that has come to it, and its process's number.

        The number is 0 before it has opened the file.
        """
        beat, asked, process = _PULSE.unpack_from(self._map, rank * _SLOT + _PULSE_AT)
        return time.monotonic() - beat, asked, process

    def write(self, state: int, line: str = "") -> None:
        """Writes this rank's slot; `WAITING` means that one more collective has begun."""
        self._number += state == WAITING
        text = line.encode("utf-8", "replace")[: _PULSE_AT - _HEAD.size - 2]
        slot = _HEAD.pack(state, self._number) + len(text).to_bytes(2, "little") + text
        self._map[self._mine * _SLOT : self._mine * _SLOT + len(slot)] = slot

    def read(self, rank: int) -> tuple[int, int, str]:
        """A rank's state, how many collectives it has begun, and its last line."""
        slot = self._map[rank * _SLOT : (rank + 1) * _SLOT]
        state, number = _HEAD.unpack_from(slot)
        length = int.from_bytes(slot[_HEAD.size : _HEAD.size + 2], "little")
        text = slot[_HEAD.size + 2 : _HEAD.size + 2 + length]
        return state, number, text.decode("utf-8", "replace")

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank * _SLOT)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank * _SLOT)
        return True
