"""Writes files and folders completely or not at all, even if the process is killed.

Each one is created in a staging folder next to its target (a rename works only within one file
system), flushed to the disk, and renamed. The staging folder's name contains random digits and the
target's name; its owner keeps it locked. Only folders with such a name and content whose owner has
ended are ever removed.
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
# In a staging folder: what will have the target's name, and what had it before.
NEW = "new"
OLD = "old"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{12}-(.+)", re.DOTALL)


def save_text(file: Path, text: str) -> None:
    """Writes a text file; a crash leaves either the old or the new file.

    Raises UserError if writing fails.
    """
    with new_file(file) as new:
        new.write_text(text, encoding="utf-8")


def check_target(target: Path, force: bool) -> None:
    """Checks a target before work on a new folder starts. Raises UserError if it exists, unless
    `force` is set.

    A folder that a killed process had moved aside is restored first, so it counts as existing.
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
    """Converts an OSError inside the block to a UserError with `what` and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from error


@contextmanager
def new_file(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """A file or folder to be created, which is renamed to `target` when the block ends without an
    error.

    Everything in it is on the disk before the rename. After a crash at any point, the target is the
    old or the new file or folder, or (between two renames) the old folder is next to it and the
    next start restores it.

    Raises UserError if writing fails (full, read-only, no permission), and if `target` exists at
    the end without `replace`.
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
                if new.is_dir():  # a file takes the name in one step
                    os.rename(target, stage / OLD)
            os.rename(new, target)
            flush(target.parent)


@contextmanager
def new_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """An empty folder to be filled; see `new_file`."""
    with new_file(target, replace=replace) as folder:
        folder.mkdir()
        try:
            yield folder
        except Exception:  # MLX and tokenizers do not say why the disk refuses: this write does
            (folder / "probe").write_bytes(bytes(1 << 16))
            raise


def remove_folder(folder: Path) -> None:
    """Deletes a folder; its name never refers to a half-deleted folder. Raises OSError if that
    fails.
    """
    with _staging(folder) as stage:
        os.rename(folder, stage / OLD)


def link_folder(source: Path, target: Path) -> None:
    """Fills a folder with the files of another one. Tensor files, which are never written in place,
    become hard links if the file system supports them, so they need no additional space.
    """
    shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        if source.endswith(".safetensors"):
            return os.link(source, target)
    shutil.copyfile(source, target)


def flush(path: Path) -> None:
    """Flushes a file or a folder's directory entries to the disk. Raises OSError if that fails."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def sweep(parent: Path) -> None:
    """Removes the staging folders in `parent` whose owners have ended, and restores the folders
    that they had moved aside.

    Folders that cannot be removed are kept: they may belong to another user, and nothing depends on
    them.
    """
    for stage in parent.iterdir() if parent.is_dir() else ():
        name = _NAME.fullmatch(stage.name)
        if name and not stage.is_symlink():
            with suppress(OSError), _opened(stage) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                # An empty one may be about to be locked; another user's is theirs to clear.
                if os.fstat(lock).st_uid == os.geteuid() and os.listdir(stage):
                    _clear(stage, parent / name[1])


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A locked staging folder for the target, removed at the end.

    Raises OSError if the disk refuses.
    """
    sweep(target.parent)
    stage = target.parent / f"{PREFIX}{secrets.token_hex(6)}-{target.name}"
    stage.mkdir(0o700)
    with _opened(stage) as lock:
        try:
            with suppress(OSError):  # a file system without locks: there nothing is ever swept
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield stage
        finally:
            # the first error is the one to report; the next start tries again
            with suppress(OSError):
                _clear(stage, target)


def _clear(stage: Path, target: Path) -> None:
    """Removes the staging folder. A target that was moved aside is renamed back.

    Nothing changes if that name is in use by then, or if the folder contains unknown files.
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
    # a named pipe would wait
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _exists(target: Path) -> str:
    return f"{target}: this already exists; --force replaces it"
