"""Files and folders that are there as a whole or not at all, whenever the process is killed.

Each is made in a staging folder beside its target (a rename works only within one file system), flushed to
the disk, and renamed. A staging folder has a name with random digits and a marker file with the target's
name, which its owner keeps locked. Only a folder with such a name and marker, whose owner is gone, is ever
removed.
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

from runners.errors import UserError, first_line

PREFIX, MARKER = ".grpo_fn-", "grpo_fn.staging.json"
NEW, OLD = "new", "old"  # in a staging folder: what will have the target's name, and what had it before
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}")
_LONGEST = 4096  # bytes of a marker
# How Rust libraries, which name the reason, and MLX, which does not, say that a disk has refused.
_REFUSED = re.compile(r"\(os error (\d+)\)|\[write\] Unable to write")
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def save_text(file: Path, text: str) -> None:
    """Writes a text file into an existing folder; a crash leaves the old file or the new one.

    OSError if the disk refuses, or if the folder is gone: it is not created again for this file.
    """
    with _staging(file) as stage:
        (stage / NEW).write_text(text, encoding="utf-8")
        flush(stage / NEW)
        os.rename(stage / NEW, file)
        flush(file.parent)


def check_target(target: Path, force: bool) -> None:
    """Before the work on a new folder: raises UserError if `target` exists, unless `force` replaces it.

    A folder that a killed process had moved aside is restored first, and so counts as existing.
    """
    if target.name in ("", ".."):
        raise UserError(f"{target}: this folder cannot be replaced; expected the name of a new one")
    with disk_errors(f"{target}: cannot be written"):
        sweep(target.parent)
    if os.path.lexists(target) and not force:
        raise UserError(_exists(target))


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError inside the block into a UserError: `what`, and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


@contextmanager
def new_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """A folder that takes the name and place of `target` when the block ends without an error.

    Everything in it is on the disk before the rename. A crash at any point leaves the old folder or the new
    one under the name, or (between two renames) the old one beside it, which the next start restores.

    Raises UserError if the disk refuses (full, read-only, no permission), and if `target` exists at the end
    without `replace`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging(target) as stage:
            (stage / NEW).mkdir()
            with _os_errors(stage / NEW):
                yield stage / NEW
            for path in (*(stage / NEW).rglob("*"), stage / NEW):
                flush(path)
            if replace and os.path.lexists(target):
                os.rename(target, stage / OLD)
            os.rename(stage / NEW, target)
            flush(target.parent)
    except OSError as error:
        if not replace and os.path.lexists(target):
            raise UserError(_exists(target)) from error
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error


def remove_folder(folder: Path) -> None:
    """Deletes a folder so that its name never shows a half-deleted one. OSError if that fails."""
    with _staging(folder) as stage:
        os.rename(folder, stage / OLD)


def flush(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk. OSError if the disk refuses."""
    with _opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


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


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A staging folder for the target, cleared away at the end. OSError if the disk refuses."""
    sweep(target.parent)
    stage = target.parent / f"{PREFIX}{secrets.token_hex(6)}"
    stage.mkdir(0o700)
    try:
        with _opened(stage / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL) as marker:
            # The lock is taken before the content is written: an empty marker is left alone by others.
            with suppress(OSError):  # a file system without locks: there nothing is ever swept
                fcntl.flock(marker, fcntl.LOCK_EX)
            content = {"format": "grpo_fn.staging", "version": 1, "target": target.name}
            os.write(marker, json.dumps(content, indent=1).encode())
            os.fsync(marker)
            yield stage
    finally:
        with suppress(OSError):  # the first error is the one to report; the next start tries again
            _clear(stage, target)


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


def _target(content: bytes) -> str | None:
    """The target's name in a marker; None: it is no marker."""
    try:
        found = json.loads(content)
        known = found["format"] == "grpo_fn.staging" and found["version"] == 1
        target = found["target"] if known else None
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    plain = isinstance(target, str) and target not in ("", ".", "..") and not set(target) & set("/\0")
    return target if plain else None


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)  # a named pipe would wait
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _os_errors(folder: Path) -> Iterator[None]:
    """Turns a disk's refusal in the words of MLX or of a Rust library into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = _REFUSED.search(str(error.__cause__ or error))
        if found is None or (found[1] and int(found[1]) not in _REFUSALS):
            raise
        if found[1] is None:
            (folder / "probe").write_bytes(bytes(1 << 16))  # fails with the reason
            raise OSError(first_line(error)) from error
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def _exists(target: Path) -> str:
    return f"{target}: this exists; --force replaces it"
