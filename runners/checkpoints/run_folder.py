"""Manages a run's folder: its lock, its checkpoints, and an earlier run's files."""

import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runners.errors import UserError
from runners.files.durable import disk_errors, link_folder, new_folder, remove_folder, sweep
from runners.files.json_files import open_own, read_json, read_lines
from runners.files.run_files import BEST, EVALUATION, EVENTS, LOCK

TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@contextmanager
def locked(folder: Path, key: str) -> Iterator[Path]:
    """Creates the folder if necessary, and locks it for this process during the block. `key` is the
    folder's name in messages.

    The kernel releases the lock when the process ends for any reason; the lock file is kept.

    Raises UserError if another process uses the folder, or if the folder is not writable.
    """
    with disk_errors(f"{key}: {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_own(folder / LOCK, os.O_RDWR)
    try:
        with disk_errors(f"{key}: {folder} cannot be locked"):
            _take(lock, folder)
        with suppress(OSError):  # disk full: the number only shows who holds the lock
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        sweep(folder)  # incomplete files of a killed run
        yield folder
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    end = time.monotonic() + 1  # a check for a running run holds the lock briefly
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() > end:
            owner = os.read(lock, 64).decode("ascii", "replace").strip() or "unknown"
            raise UserError(
                f"{folder} is in use by process {owner}; wait for it, or choose another run.name"
            )
        time.sleep(0.01)


def place_of(folder: Path) -> tuple[int, int] | None:
    """Returns an identifier that distinguishes a folder from a later one at the same path, or None
    if there is no folder.
    """
    with suppress(OSError):
        facts = os.stat(folder)
        return facts.st_dev, facts.st_ino
    return None


def check_place(folder: Path, place: tuple[int, int] | None) -> None:
    """Raises UserError if `folder` is no longer the folder that `place_of` identified. In that
    case, the original folder was renamed or removed, and another run may now use its path.
    """
    found = place_of(folder)
    if found != place:
        raise UserError(
            f"{folder}: expected the folder in which this run started, found "
            f"{'another' if found else 'none'}; nothing is saved until the folder is renamed back"
        )


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Returns all folders with a checkpoint's name, keyed by step, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in paths]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the run's complete checkpoints, oldest step first."""
    return [
        path for path in checkpoint_folders(folder).values() if (path / TRAINER_STATE).is_file()
    ]


def interrupted(folder: Path) -> str | None:
    """Returns the newest checkpoint's name if the run has not finished since then; otherwise,
    returns None.

    Whether the run has finished is read from its last event, because copying changes time stamps.
    Without events, the run counts as finished if its final model exists.
    """
    with disk_errors(f"{folder} cannot be read"):
        whole = list_checkpoints(folder)
        ends = [
            event for event in read_lines(folder / EVENTS) if event.get("event") in ("start", "end")
        ]
    finished = not ends or (ends[-1]["event"], ends[-1].get("state")) == ("end", "finished")
    if not whole or (finished and (folder / "final" / "config.json").is_file()):
        return None
    return whole[-1].name


def clear(folder: Path) -> None:
    """Removes an earlier run's checkpoints and model. The earlier run's logs are renamed later,
    when new logs are created.
    """
    with disk_errors(f"{folder} cannot be cleared"):
        for found in (*checkpoint_folders(folder).values(), folder / "final", folder / BEST):
            if found.is_dir() and not found.is_symlink():
                remove_folder(found)


def saved_best(folder: Path) -> dict:
    """Returns the evaluation results of a run's best weights, and the update that produced these
    weights. The dict is empty if there are no best weights.
    """
    with suppress(UserError):
        return read_json(folder / BEST / EVALUATION)
    return {}


def restore_best(folder: Path, checkpoint: Path) -> None:
    """Replaces the run's best weights with those in a checkpoint, or removes them if the checkpoint
    contains none.
    """
    if (checkpoint / BEST).is_dir():
        with new_folder(folder / BEST) as best:
            link_folder(checkpoint / BEST, best)
    elif (folder / BEST).is_dir():
        with disk_errors(f"{folder / BEST} cannot be removed"):
            remove_folder(folder / BEST)


def set_aside(folder: Path, after: int) -> list[tuple[str, str]]:
    """Renames the checkpoints of later steps if the run resumes from an earlier one. Returns the
    old and the new names.

    The new name is NAME.aside, or NAME.aside-2 and so on if that name exists, so nothing is
    replaced.
    """
    moved = []
    with disk_errors(f"{folder} cannot be written"):
        for path in [path for step, path in checkpoint_folders(folder).items() if step > after]:
            names = (f"{path.name}.aside{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
            aside = next(name for name in names if not os.path.lexists(path.with_name(name)))
            path.rename(path.with_name(aside))
            moved.append((path.name, aside))
    return moved
