"""Open files and folders of a run, in a process where user code can close any descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress


class HeldFile:
    """An open file or folder that always stays the same one.

    A reward can close its descriptor, and another file can get the same number. Then it is opened again by
    its path, if the path still leads to it.
    """

    def __init__(
        self,
        path: os.PathLike | str,
        flags: int,
        *,
        within: HeldFile | None = None,
        prepare: Callable[[int], None] = lambda number: None,
    ):
        """Opens the path; OSError if that fails.

        Args:
            path: the file's or folder's.
            flags: as for `os.open`; O_CREAT applies only the first time.
            within: the folder that `path` is relative to; None: the working folder.
            prepare: called with the descriptor each time it is opened again.
        """
        self._path, self._flags, self._within, self._prepare = path, flags | os.O_CLOEXEC, within, prepare
        self._number = self._open(self._flags)
        self._is = os.fstat(self._number)

    @property
    def number(self) -> int:
        """The descriptor. OSError (ESTALE) if it was closed and the path leads to another file."""
        if not self._is_open():
            found = self._open(self._flags & ~os.O_CREAT)
            try:
                if not os.path.samestat(os.fstat(found), self._is):
                    raise OSError(errno.ESTALE, "its descriptor was closed, and another file has its name")
                self._prepare(found)
            except OSError:
                os.close(found)
                raise
            self._number = found
        return self._number

    def close(self) -> None:
        """Closes the descriptor, unless it is closed already."""
        if self._is_open():
            os.close(self._number)

    def _open(self, flags: int) -> int:
        return os.open(self._path, flags, 0o666, dir_fd=self._within and self._within.number)

    def _is_open(self) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._number), self._is)
        return False
