"""Staging folders: files and folders are written in one, and get their name by a rename when complete.

A staging folder is beside its target, because a rename works only within one file system. Its name ends in
random digits, and a marker file in it identifies it. Its owner keeps the marker locked. Only a folder with
such a name and marker whose owner is gone is ever removed; nothing else beside the target is touched. All
steps use descriptors, so they stay in one folder even if its path changes meanwhile.
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
NEW = "new"  # the new folder or file
OLD = "old"  # the one that had the target's name before
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # to open a folder, never a link
_FORMAT = "grpo_fn.staging"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}")
_LONGEST = 4096  # bytes of a marker
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
# Errors of file systems without locks: there it is unknown whether an owner lives, and nothing is removed.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@attrs.frozen
class Staging:
    """A staging folder that this process works in, by descriptors."""

    parent: int  # the common parent folder of it and its target
    folder: int
    marker: int  # locked
    name: str
    target: str

    def put(self, *, replace: bool) -> None:
        """Gives the new folder the target's name; with `replace` an existing target is moved aside first.

        Raises OSError if the disk refuses, and if the name is taken without `replace`.
        """
        while True:
            try:
                os.rename(NEW, self.target, src_dir_fd=self.folder, dst_dir_fd=self.parent)
                return
            except OSError as error:
                if not replace or error.errno not in _TAKEN:
                    raise
            self._remove(OLD)  # only if another process took the name between the two renames
            with suppress(FileNotFoundError):
                os.rename(self.target, OLD, src_dir_fd=self.parent, dst_dir_fd=self.folder)

    def clear(self) -> None:
        """Removes the staging folder. A target that was moved aside gets its name back, if the name is free.

        Does nothing if something else has that name, or if the folder contains foreign files.
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
    """A staging folder in `parent` for the name `target`; removed at the end.

    OSError if the disk refuses.
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
    """Removes the staging folders in `parent` whose owners are gone, and restores what they moved aside.

    Folders that cannot be removed stay: they may belong to another user, and nothing depends on them.
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
        # The lock is taken before the content is written: an empty marker is left alone by others.
        says = {"format": _FORMAT, "version": 1, "target": target, "process": os.getpid()}
        os.write(marker, json.dumps(says, indent=1).encode())
        os.fsync(marker)
        undo.pop_all()
    return Staging(parent, folder, marker, name, target)


def _claim(parent: int, name: str) -> Staging | None:
    """The staging folder of that name, locked for this process; None if it is not a staging folder.

    OSError if it cannot be opened, and BlockingIOError if its owner lives.
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
        if target is None or not os.fstat(marker).st_nlink:  # or another process has just removed it
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
