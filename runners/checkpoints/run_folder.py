"""The folder of a run: its lock, its current path, and the files of an earlier run in it."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from runners.checkpoints.manifest import Damaged, check_manifest
from runners.checkpoints.snapshot import LATEST, checkpoint_folders, list_checkpoints
from runners.errors import UserError
from runners.files.durable import remove_folder, sweep
from runners.files.json_lines import LineFile
from runners.files.run_files import COMPLETIONS, EVENTS, LOCK, METRICS, RESOLVED

BAD_BATCHES = "bad_batches"
_OWNER = re.compile(rb"\d{0,20}\n?")  # the content of a lock file


class FolderGone(UserError):
    """A run's folder that was deleted or renamed under the run."""


@attrs.frozen
class RunFolder:
    """A run's folder, locked for this process."""

    path: Path
    lock: int  # the descriptor of its lock file

    def here(self) -> Path:
        """The folder's path. FolderGone if another folder, or none, has it by now."""
        if not _is_lock(self.path / LOCK, self.lock):
            raise FolderGone(f"{self.path}: the run's folder is gone")
        return self.path

    @contextmanager
    def created_again(self) -> Iterator[RunFolder]:
        """A new folder at the run's path, for a run whose folder is gone. UserError if another run has it."""
        with locked(self.path, "run.name") as fresh:
            if name := run_file_in(self.path):
                raise UserError(f"{self.path}: the run's folder is gone, and another run is there ({name})")
            yield fresh


@contextmanager
def locked(folder: Path, key: str) -> Iterator[RunFolder]:
    """The folder, created if missing, for this process alone; `key` is its name in messages.

    The lock is the kernel's and ends with the process, however it ends: a file left by a dead process locks
    nothing. At the end the lock's file is removed, and the folder too if it is still empty.

    Raises UserError if another process uses it, or if it cannot be written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder)
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be written: {error.strerror or error}") from error
    try:
        for place in (folder, folder / BAD_BATCHES):  # what a killed run left incomplete
            sweep(place)
        yield RunFolder(folder, lock)
    finally:
        with suppress(OSError):  # a folder that is not empty stays
            if _is_lock(folder / LOCK, lock):
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()
        os.close(lock)


def _acquire(folder: Path) -> int:
    other, file = "or choose another run.name", folder / LOCK
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(lock, 32).decode("ascii", "replace").strip()
            os.close(lock)
            raise UserError(
                f"{folder} is in use by process {owner or 'unknown'}; wait for it, {other}"
            ) from error
        if not _OWNER.fullmatch(os.read(lock, 64)):
            os.close(lock)
            raise UserError(f"{file}: found a file that is no run's lock; move it, {other}")
        # Between the two calls its owner may have removed the file: then the lock is useless.
        if _is_lock(file, lock):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            return lock
        os.close(lock)


def _is_lock(file: Path, lock: int) -> bool:
    """Whether an open lock file still has this path."""
    try:
        return os.path.samestat(os.stat(file, follow_symlinks=False), os.fstat(lock))
    except FileNotFoundError:
        return False


def run_file_in(folder: Path) -> str | None:
    """The name of a file or folder that a run left here; None if there is none."""
    left = [METRICS, COMPLETIONS, "final", *(path.name for path in checkpoint_folders(folder).values())]
    return next((name for name in left if (folder / name).exists()), None)


def model_of_run(name: str, note: Callable[[str], None]) -> str:
    """The model of a run's folder: `final`, else its newest whole checkpoint.

    Any other name is returned as it is. `note` gets a line if a checkpoint is used, and for each damaged one.
    Raises UserError if the run has neither.
    """
    folder = Path(name).expanduser()
    if not (folder / RESOLVED).is_file():
        return name
    if (folder / "final").is_dir():
        return str(folder / "final")
    for path in reversed(checkpoint_folders(folder).values()):
        try:
            check_manifest(path)
        except Damaged as error:
            note(f"{error}; {path.name} is skipped")
            continue
        note(f"{name}: this run has no final model; using its newest whole checkpoint, {path.name}")
        return str(path)
    raise UserError(f"{name}: this run has no final model and no whole checkpoint")


def interrupted(folder: Path) -> str | None:
    """The name of the newest checkpoint of a run that has not finished since; else None.

    Its last event tells, not a time stamp, which a copy changes; without events its final model.
    """
    try:
        whole = list_checkpoints(folder)
        ends = [event for event in LineFile(folder / EVENTS).read() if event.get("event") in ("start", "end")]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}") from error
    finished = not ends or (ends[-1]["event"], ends[-1].get("state")) == ("end", "finished")
    if not whole or (finished and (folder / "final" / "config.json").is_file()):
        return None
    return whole[-1].name


def clear(folder: Path) -> None:
    """Removes an earlier run's checkpoints and model; its logs are renamed when new ones begin."""
    try:
        (folder / LATEST).unlink(missing_ok=True)
        for found in (*checkpoint_folders(folder).values(), folder / "final", folder / BAD_BATCHES):
            if found.is_dir() and not found.is_symlink():
                remove_folder(found)
    except OSError as error:
        raise UserError(f"{folder} cannot be cleared: {error.strerror or error}") from error


def set_aside(folder: Path, after: int) -> list[tuple[str, str]]:
    """Renames the checkpoints of later steps, because the run continues from an earlier one. Returns the old
    and the new names.

    The new name is NAME.aside, or NAME.aside-2 and so on if that exists: nothing is replaced.
    """
    moved = []
    try:
        for step, path in checkpoint_folders(folder).items():
            if step > after:
                names = (f"{path.name}.aside{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
                aside = next(name for name in names if not os.path.lexists(path.with_name(name)))
                path.rename(path.with_name(aside))
                moved.append((path.name, aside))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
    return moved
