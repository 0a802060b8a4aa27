"""Staging folders: files and folders are written in one, and get their name by a rename when complete.

A staging folder is beside its target, because a rename works only within one file system. Its name ends in
random digits, and a marker file in it names the target. Its owner keeps the marker locked. Only a folder with
such a name and marker whose owner is gone is ever removed; nothing else beside the target is touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".grpo_fn-"
MARKER = "grpo_fn.staging.json"
NEW = "new"  # the new folder or file
OLD = "old"  # the one that had the target's name before
_FORMAT = "grpo_fn.staging"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}")
_LONGEST = 4096  # bytes of a marker
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A staging folder for the target, cleared away at the end. OSError if the disk refuses."""
    stage = target.parent / f"{PREFIX}{secrets.token_hex(6)}"
    stage.mkdir(0o700)
    try:
        with _opened(stage / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL) as marker:
            # The lock is taken before the content is written: an empty marker is left alone by others.
            with suppress(OSError):  # a file system without locks: there nothing is ever swept
                fcntl.flock(marker, fcntl.LOCK_EX)
            content = {"format": _FORMAT, "version": 1, "target": target.name, "process": os.getpid()}
            os.write(marker, json.dumps(content, indent=1).encode())
            os.fsync(marker)
            yield stage
    finally:
        with suppress(OSError):  # the first error is the one to report; the next start tries again
            _clear(stage, target)


def put(stage: Path, target: Path, *, replace: bool) -> None:
    """Gives the new folder the target's name; with `replace` an existing target is moved aside first.

    Raises OSError if the disk refuses, and if the name is taken without `replace`.
    """
    try:
        os.rename(stage / NEW, target)
    except OSError as error:
        if not replace or error.errno not in _TAKEN:
            raise
        os.rename(target, stage / OLD)
        os.rename(stage / NEW, target)


def sweep(parent: Path) -> None:
    """Removes the staging folders in `parent` whose owners are gone, and restores what they moved aside.

    Folders that cannot be removed stay: they may belong to another user, and nothing depends on them.
    """
    for stage in parent.iterdir() if parent.is_dir() else ():
        if not _NAME.fullmatch(stage.name) or stage.is_symlink():
            continue
        with suppress(OSError), _opened(stage / MARKER, os.O_RDWR | os.O_NOFOLLOW) as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
            target = _target(os.read(marker, _LONGEST))
            if target is not None:
                _clear(stage, parent / target)


def _clear(stage: Path, target: Path) -> None:
    """Removes the staging folder. A target that was moved aside gets its name back.

    If something else has that name by then, or if the folder has foreign files, all stays as it is.
    """
    if not {NEW, OLD, MARKER}.issuperset(os.listdir(stage)):
        return
    if os.path.lexists(stage / NEW) and os.path.lexists(stage / OLD):
        if os.path.lexists(target):
            return
        os.rename(stage / OLD, target)
    for path in (stage / OLD, stage / NEW):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (stage / MARKER).unlink(missing_ok=True)  # last, because it identifies the folder
    stage.rmdir()


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)  # a named pipe would wait
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _target(content: bytes) -> str | None:
    """The target's name in a marker; None: it is no marker."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != _FORMAT or found.get("version") != 1:
        return None
    target = found.get("target")
    plain = isinstance(target, str) and target not in ("", ".", "..") and not set(target) & set("/\0")
    return target if plain else None
