"""A file that the ranks of one host share: who waits, who is stopped, who has ended and why, and who is gone.

Each rank has a slot in the file and holds a lock on it. The system releases the lock when the process ends,
however it ends. If another rank can take the lock, the rank is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from contextlib import suppress

import numpy as np

WORKING, WAITING, ENDED = 0, 1, 2
_SLOT = np.dtype(
    [
        ("beat", "f8"),  # the time of the last one
        ("asked", "i8"),  # the signal that has come
        ("process", "i8"),  # its number
        ("begun", "i8"),  # collectives
        ("line", "S464"),  # why it has ended
        ("state", "i8"),
    ]
)


class Scoreboard:
    """The slots of `size` ranks; `mine` is written, the others are read."""

    def __init__(self, path: str, size: int, mine: int) -> None:
        """Opens the file, which `create` made, and takes this rank's lock."""
        self._slots = np.memmap(path, _SLOT, "r+", shape=(size,))
        self._own = self._slots[mine : mine + 1]
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # last: a lock ends if any descriptor is closed
        self.beat(0)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, mine)

    @staticmethod
    def create(size: int) -> str:
        """The path of a new file for `size` ranks. `remove` it when all have opened it."""
        number, path = tempfile.mkstemp(prefix="grpo-ranks-")
        os.ftruncate(number, size * _SLOT.itemsize)
        os.close(number)
        return path

    @staticmethod
    def remove(path: str) -> None:
        """Removes the file's name; processes that have it open keep it."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def beat(self, asked: int) -> None:
        """Shows that this process runs, and the signal that has come to it; 0: none."""
        self._own["beat"], self._own["asked"], self._own["process"] = time.monotonic(), asked, os.getpid()

    def pulse(self, rank: int) -> tuple[float, int, int]:
        """Seconds since a rank's last beat, the signal that has come to it, and its process's number.

        The number is 0 before it has opened the file.
        """
        slot = self._slots[rank]
        return time.monotonic() - float(slot["beat"]), int(slot["asked"]), int(slot["process"])

    def write(self, state: int, line: str = "") -> None:
        """Writes this rank's slot; `WAITING` means that one more collective has begun."""
        self._own["line"] = line.encode("utf-8", "replace")
        self._own["begun"] += state == WAITING
        self._own["state"] = state

    def read(self, rank: int) -> tuple[int, int, str]:
        """A rank's state, how many collectives it has begun, and its last line."""
        slot = self._slots[rank]
        return int(slot["state"]), int(slot["begun"]), bytes(slot["line"]).decode("utf-8", "replace")

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True
