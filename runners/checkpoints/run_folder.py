"""The folder of a run: its lock, its current path, and the files of an earlier run in it."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import attrs

from runners.checkpoints.manifest import Damaged, check_manifest
from runners.checkpoints.snapshot import LATEST, checkpoint_folders, list_checkpoints
from runners.errors import UserError
from runners.files.durable import remove_folder
from runners.files.line_files import LineFile
from runners.files.run_files import COMPLETIONS, EVENTS, LOCK, METRICS, RESOLVED
from runners.files.staging import FOLDER_FLAGS, sweep

BAD_BATCHES = "bad_batches"
T = TypeVar("T")
_OWNER = re.compile(rb"\d{0,20}\n?")  # the content of a lock file


class FolderGone(UserError):
    """A run's folder that was deleted, or moved to another disk."""


@attrs.frozen
class RunFolder:
    """A run's folder, held open, so that it stays the same folder even if its path changes."""

    path: Path  # as the config names it
    descriptor: int
    lock: int | None = None  # the descriptor of its file

    def here(self) -> Path:
        """The folder's current path: its own, or the one after a rename. FolderGone if it is deleted."""
        held, path, answer = os.fstat(self.descriptor), self.path, None
        while True:  # it may be renamed between the system's answer and the check: then try again
            with suppress(OSError):
                if os.path.samestat(os.stat(path), held):
                    return path
            before, answer = answer, _path_of(self.descriptor)
            if answer is None or answer == before:
                raise FolderGone(f"{self.path}: the run's folder is gone")
            path = answer

    def write(self, act: Callable[[Path, int], T]) -> T:
        """The result of `act` for the folder's path and descriptor.

        If the folder is renamed meanwhile, `act` fails, because the path of its new files is gone. Then it is
        called once more with the new path.
        """
        path = self.here()
        try:
            return act(path, self.descriptor)
        except (OSError, UserError):
            now = self.here()
            if now == path:
                raise
        return act(now, self.descriptor)

    @contextmanager
    def anew(self) -> Iterator[RunFolder]:
        """A new folder at the run's path, for a run whose folder is gone. UserError if another run has it."""
        with locked(self.path, "run.name") as fresh:
            if name := run_file_in(self.path):
                raise UserError(f"{self.path}: the run's folder is gone, and another run is there ({name})")
            yield fresh


@contextmanager
def locked(folder: Path, key: str) -> Iterator[RunFolder]:
    """The folder, created if missing, for this process alone; `key` is its name in messages.

    The lock is the kernel's and ends with the process, however it ends: a file left by a dead process locks
    nothing. At the end the lock's file is removed, and the folder too if it is still empty. If the path leads
    to another folder by then, nothing in it is touched.

    Raises UserError if another process uses it, or if it cannot be written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = RunFolder(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            stack.callback(os.close, held.descriptor)
            held = attrs.evolve(held, lock=_acquire(held))
            stack.callback(_release, held, made)
            _sweep(held)
        except OSError as error:
            raise UserError(f"{key}: {folder} cannot be written: {error.strerror or error}") from error
        yield held


def _sweep(held: RunFolder) -> None:
    """Removes incomplete files that a killed run left."""
    sweep(held.descriptor)
    try:
        inside = os.open(BAD_BATCHES, FOLDER_FLAGS, dir_fd=held.descriptor)
    except OSError:  # the folder does not exist, or a file or a link has its name
        return
    try:
        sweep(inside)
    finally:
        os.close(inside)


def _acquire(held: RunFolder) -> int:
    other = "or choose another run.name"
    while True:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, dir_fd=held.descriptor)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(lock, 32).decode("ascii", "replace").strip()
            os.close(lock)
            raise UserError(
                f"{held.path} is in use by process {owner or 'unknown'}; wait for it, {other}"
            ) from error
        if not _OWNER.fullmatch(os.read(lock, 64)):
            os.close(lock)
            raise UserError(f"{held.path / LOCK}: found a file that is no run's lock; move it, {other}")
        # Between the two calls its owner may have removed the file: then the lock is useless.
        if _is_lock(held, lock):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            return lock
        os.close(lock)


def _release(held: RunFolder, made: Sequence[Path]) -> None:
    """Removes the lock's file, and those of this run's folders in `made` that are still empty."""
    if held.lock is not None:
        with suppress(OSError):
            if _is_lock(held, held.lock):
                os.unlink(LOCK, dir_fd=held.descriptor)
        os.close(held.lock)
    with suppress(OSError):  # a folder that is not empty stays
        if made and os.path.samestat(os.stat(held.path), os.fstat(held.descriptor)):
            for path in made:
                path.rmdir()


def _is_lock(held: RunFolder, lock: int) -> bool:
    """Whether an open lock file still has its name."""
    try:
        found = os.stat(LOCK, dir_fd=held.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(lock))


def _path_of(descriptor: int) -> Path | None:
    """The current path of an open folder, as the system knows it; None if it does not tell."""
    if command := getattr(fcntl, "F_GETPATH", None):  # macOS
        name = fcntl.fcntl(descriptor, command, bytes(1024))
        return Path(os.fsdecode(name.rstrip(b"\0")))
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None


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


def clear(folder: RunFolder) -> None:
    """Removes an earlier run's checkpoints and model; its logs are renamed when new ones begin."""
    path = folder.path
    try:
        with suppress(FileNotFoundError):
            os.unlink(LATEST, dir_fd=folder.descriptor)
        for found in (*checkpoint_folders(path).values(), path / "final", path / BAD_BATCHES):
            if found.is_dir() and not found.is_symlink():
                remove_folder(found, within=folder.descriptor)
    except OSError as error:
        raise UserError(f"{path} cannot be cleared: {error.strerror or error}") from error


def set_aside(folder: RunFolder, after: int) -> list[tuple[str, str]]:
    """Renames the checkpoints of later steps, because the run continues from an earlier one. Returns the old
    and the new names.

    The new name is NAME.aside, or NAME.aside-2 and so on if that exists: nothing is replaced.
    """
    moved = []
    try:
        for step, path in checkpoint_folders(folder.path).items():
            if step > after:
                names = (f"{path.name}.aside{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
                aside = next(name for name in names if not os.path.lexists(path.with_name(name)))
                os.rename(path.name, aside, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
                moved.append((path.name, aside))
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written: {error.strerror or error}") from error
    return moved
