"""Staging folders: files and folders are written in one, and get their name by a rename once they are whole.

A staging folder lies beside its target, because a rename works within one file system only. Its name ends in
random digits, and a marker file in it says what it is. Its owner keeps the marker locked. Only a folder that
has the name and the marker, and whose owner is gone, is ever cleared away; nothing else beside the target is
touched. All steps go through descriptors, so they stay in one folder even if its path changes meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import attrs

PREFIX = ".grpo_fn-"
MARKER = "grpo_fn.staging.json"
NEW = "new"  # what is being written
OLD = "old"  # what had the target's name before
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # to open one, and no link
_FORMAT = "grpo_fn.staging"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}")
_LONGEST = 4096  # bytes of a marker
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
# Of file systems without locks: there nobody can tell whether an owner lives, and nothing is cleared away.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@attrs.frozen
class Staging:
    """A staging folder that this process works in, by descriptors."""

    parent: int  # the folder that it and its target lie in
    folder: int
    marker: int  # locked
    name: str
    target: str

    def put(self, *, replace: bool) -> None:
        """Gives the new folder the target's name; with `replace` what has that name is moved aside first.

        Raises OSError where the disk refuses, and where the name is taken without `replace`.
        """
        while True:
            try:
                os.rename(NEW, self.target, src_dir_fd=self.folder, dst_dir_fd=self.parent)
                return
            except OSError as error:
                if not replace or error.errno not in _TAKEN:
                    raise
            self._remove(OLD)  # only where another process took the name between the two renames
            with suppress(FileNotFoundError):
                os.rename(self.target, OLD, src_dir_fd=self.parent, dst_dir_fd=self.folder)

    def clear(self) -> None:
        """Removes it. A target that was moved aside gets its name back, unless the new one is in place.

        Does nothing where that name is taken by something else, or where somebody put files of their own in.
        """
        found = set(os.listdir(self.folder))
        if not found <= {NEW, OLD, MARKER}:
            return
        if {NEW, OLD} <= found:
            if _exists(self.target, self.parent):
                return
            os.rename(OLD, self.target, src_dir_fd=self.folder, dst_dir_fd=self.parent)
        self._remove(OLD)
        self._remove(NEW)
        self._remove(MARKER)
        os.rmdir(self.name, dir_fd=self.parent)

    def close(self) -> None:
        """Gives up the lock."""
        os.close(self.marker)
        os.close(self.folder)

    def _remove(self, name: str) -> None:
        try:
            found = os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(name, dir_fd=self.folder)
        else:
            os.unlink(name, dir_fd=self.folder)


@contextmanager
def staging(parent: int, target: str) -> Iterator[Staging]:
    """A staging folder in `parent` for the name `target`; cleared away at the end.

    OSError where the disk refuses.
    """
    made = _make(parent, target)
    try:
        yield made
        made.clear()
    except BaseException:
        with suppress(OSError):  # the first error is the one to report; the next start tries again
            made.clear()
        raise
    finally:
        made.close()


def sweep(parent: int) -> None:
    """Clears away the staging folders in `parent` whose owners are gone; what they moved aside comes back.

    What cannot be removed stays: it may belong to somebody else, and what comes next does not depend on it.
    """
    for name in filter(_NAME.fullmatch, os.listdir(parent)):
        with suppress(OSError):
            left = _claim(parent, name)
            if left is not None:
                try:
                    left.clear()
                finally:
                    left.close()


def _make(parent: int, target: str) -> Staging:
    name = f"{PREFIX}{secrets.token_hex(6)}"
    os.mkdir(name, 0o700, dir_fd=parent)
    with ExitStack() as undo:
        undo.callback(_attempt, os.rmdir, name, dir_fd=parent)
        folder = _opened(undo, name, FOLDER_FLAGS, parent)
        marker = _opened(undo, MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, folder)
        undo.callback(_attempt, os.unlink, MARKER, dir_fd=folder)
        try:
            fcntl.flock(marker, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        # The lock comes before the content: whoever finds a marker that says nothing leaves it alone.
        says = {"format": _FORMAT, "version": 1, "target": target, "process": os.getpid()}
        os.write(marker, json.dumps(says, indent=1).encode())
        os.fsync(marker)
        undo.pop_all()
    return Staging(parent, folder, marker, name, target)


def _claim(parent: int, name: str) -> Staging | None:
    """The staging folder of that name, locked for this process; None where it is none.

    OSError where it cannot be opened, and BlockingIOError where its owner lives.
    """
    with ExitStack() as undo:
        folder = _opened(undo, name, FOLDER_FLAGS, parent)
        # O_NONBLOCK: a named pipe would wait for its other end.
        marker = _opened(undo, MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, folder)
        found = os.fstat(marker)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > _LONGEST:
            return None
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
        target = _target(os.read(marker, _LONGEST))
        if target is None or not os.fstat(marker).st_nlink:  # or another process has just cleared it away
            return None
        undo.pop_all()
    return Staging(parent, folder, marker, name, target)


def _opened(undo: ExitStack, name: str, flags: int, parent: int) -> int:
    descriptor = os.open(name, flags, 0o600, dir_fd=parent)
    undo.callback(os.close, descriptor)
    return descriptor


def _attempt(function: Callable[..., None], name: str, *, dir_fd: int) -> None:
    with suppress(OSError):
        function(name, dir_fd=dir_fd)


def _target(content: bytes) -> str | None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != _FORMAT or found.get("version") != 1:
        return None
    target = found.get("target")
    plain = isinstance(target, str) and target not in ("", ".", "..") and not set(target) & set("/\0")
    return target if plain else None


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
