"""Writes each file or folder completely or not at all, even if the process is killed.

Each file or folder is created in a staging folder next to its target (a rename works only within
one file system), flushed to the disk, and renamed. The staging folder's name contains random digits
and the target's name; its owner keeps it locked. A leftover staging folder is removed only if its
name and content have this form and its owner has ended.
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runners.errors import UserError

PREFIX = ".grpo_fn-"
# Names in a staging folder: the new file or folder, and the target that it replaces.
NEW = "new"
OLD = "old"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}-(.+)", re.DOTALL)


def save_text(file: Path, text: str) -> None:
    """Writes a text file. After a crash, the file is either the old or the new one.

    Raises UserError if writing fails.
    """
    with new_file(file) as new:
        new.write_text(text, encoding="utf-8")


def check_target(target: Path, force: bool) -> None:
    """Checks a target before work on a new folder starts. Raises UserError if the target exists,
    unless `force` is set.

    A folder that a killed process had moved aside is restored first, and therefore counts as
    existing.
    """
    if target.name in ("", ".."):
        raise UserError(
            f"{target}: this folder cannot be replaced; expected the name of a new folder"
        )
    with disk_errors(f"{target}: cannot be written"):
        sweep(target.parent)
    if os.path.lexists(target) and not force:
        raise UserError(_exists(target))


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Converts an OSError inside the block to a UserError that contains `what` and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


@contextmanager
def new_file(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yields a path at which the block creates a file or folder. When the block ends without an
    error, the path is renamed to `target`.

    All content is on the disk before the rename. After a crash at any point, the target is either
    the old or the new file or folder. After a crash between two renames, the old folder is next to
    the target, and the next start restores it.

    Raises UserError if writing fails (disk full, read-only, no permission), or if `target` exists
    at the end and `replace` is False.
    """
    with disk_errors(f"{target}: cannot be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging(target) as stage:
            new = stage / NEW
            yield new
            for path in (*new.rglob("*"), new):
                flush(path)
            if os.path.lexists(target):
                if not replace:
                    raise UserError(_exists(target))
                if new.is_dir():  # a file is replaced in one step
                    os.rename(target, stage / OLD)
            os.rename(new, target)
            flush(target.parent)


@contextmanager
def new_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yields an empty folder for the block to fill; see `new_file`."""
    with new_file(target, replace=replace) as folder:
        folder.mkdir()
        try:
            yield folder
        except Exception:  # MLX and tokenizers do not report the reason; this write does
            (folder / "probe").write_bytes(bytes(1 << 16))
            raise


def remove_folder(folder: Path) -> None:
    """Deletes a folder. The folder's name never refers to a half-deleted folder. Raises OSError if
    the deletion fails.
    """
    with _staging(folder) as stage:
        os.rename(folder, stage / OLD)


def link_folder(source: Path, target: Path) -> None:
    """Fills a folder with another folder's files. Tensor files, which are never written in place,
    become hard links if the file system supports hard links, so they need no additional space.
    """
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        if source.endswith(".safetensors"):
            return os.link(source, target)
    shutil.copyfile(source, target)


def flush(path: Path) -> None:
    """Flushes a file's content or a folder's entries to the disk. Raises OSError if that fails."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def sweep(parent: Path) -> None:
    """Removes the staging folders in `parent` whose owners have ended, and restores the folders
    that these owners had moved aside.

    Staging folders that cannot be removed are kept: they may belong to another user, and nothing
    depends on them.
    """
    for stage in parent.iterdir() if parent.is_dir() else ():
        name = _NAME.fullmatch(stage.name)
        if name and not stage.is_symlink():
            with suppress(OSError), _opened(stage) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                # An empty folder may be about to be locked; another user's folder is kept.
                if os.fstat(lock).st_uid == os.geteuid() and os.listdir(stage):
                    _clear(stage, parent / name[1])


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Yields a locked staging folder for the target, which is removed at the end.

    Raises OSError if the folder cannot be created or opened.
    """
    sweep(target.parent)
    stage = target.parent / f"{PREFIX}{secrets.token_hex(6)}-{target.name}"
    stage.mkdir(0o700)
    with _opened(stage) as lock:
        try:
            with suppress(OSError):  # on a file system without locks, nothing is ever swept
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield stage
        finally:
            # only the first error is reported; the next start tries again
            with suppress(OSError):
                _clear(stage, target)


def _clear(stage: Path, target: Path) -> None:
    """Removes the staging folder. If a target was moved aside and not replaced, it is renamed back.

    Nothing changes if the target's name is in use by then, or if the staging folder contains
    unknown files.
    """
    if not {NEW, OLD}.issuperset(os.listdir(stage)):
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
    stage.rmdir()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # O_NONBLOCK: opening a named pipe would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _exists(target: Path) -> str:
    return f"{target}: this already exists; --force replaces it"
