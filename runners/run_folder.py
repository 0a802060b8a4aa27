"""The folder of a run: who may write into it, and what of an earlier run lies there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runners.checkpoint import LATEST, checkpoint_folders
from runners.durable import remove_folder, sweep
from runners.errors import UserError

LOCK = ".lock"
LOGS = ("training_log.jsonl", "completions.jsonl")


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """The folder, made if need be, for this process alone; `key` is what messages call it.

    The lock is the kernel's and ends with the process, however that ends: a file left by a dead one holds
    nothing. A folder that is still empty at the end goes again.

    Raises UserError where another process is in it, or where it cannot be written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire(folder)
        sweep(folder)  # what a killed run left half-done
    except OSError as error:
        raise UserError(f"{key}: {folder} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # a reward may have closed it
            os.close(lock)
        with suppress(OSError):  # something is in it: then it stays
            for path in made:
                path.rmdir()


def _acquire(folder: Path) -> int:
    file = folder / LOCK
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(lock, 32).decode("ascii", "replace").strip()
            os.close(lock)
            raise UserError(
                f"{folder} is in use by process {owner or 'unknown'}; wait for it, or choose another run.name"
            ) from error
        # Between the two calls its owner may have removed the file: then the lock is on nothing.
        if os.path.exists(file) and os.path.samestat(os.fstat(lock), os.stat(file)):
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            return lock
        os.close(lock)


def holds_a_run(folder: Path) -> str | None:
    """The name of something that a run left in the folder; None: there is nothing."""
    left = [*LOGS, "final", *(path.name for path in checkpoint_folders(folder).values())]
    return next((name for name in left if (folder / name).exists()), None)


def clear(folder: Path) -> None:
    """Removes an earlier run's checkpoints and model; its logs are kept aside once new ones begin."""
    try:
        (folder / LATEST).unlink(missing_ok=True)
        for path in (*checkpoint_folders(folder).values(), folder / "final", folder / "bad_batches"):
            if path.is_dir() and not path.is_symlink():
                remove_folder(path)
    except OSError as error:
        raise UserError(f"{folder} cannot be cleared: {error.strerror or error}") from error


def set_aside(folder: Path, after: int) -> list[Path]:
    """Renames the checkpoints of later steps to NAME.aside: the run goes on from an earlier one."""
    moved = []
    try:
        for step, path in checkpoint_folders(folder).items():
            if step > after:
                aside = path.with_name(f"{path.name}.aside")
                if aside.exists():
                    remove_folder(aside)
                os.rename(path, aside)
                moved.append(path)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
    return moved
