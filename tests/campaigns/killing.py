"""What the harnesses that kill processes share: a tally, the wait for a moment, the files around targets."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from runners.files.durable import NEW, OLD, PREFIX
from tests.support.files.decoys import look, plant

ROOT = Path(__file__).resolve().parents[2]
SAVING = 0.7  # share of the kills that wait for a save
PATIENCE = 600.0  # seconds for a process to come to its moment


@attrs.define
class Tally:
    """What was seen."""

    kills: int = 0
    while_saving: int = 0  # a half-made folder lay there
    pairs: int = 0  # of processes side by side
    runs: int = 0  # brought to their end
    unmarked: int = 0  # empty staging folders, of processes killed just before or after their work
    problems: list[str] = attrs.field(factory=list)

    def add(self, other: Tally) -> None:
        """What another hunt has seen, too."""
        for name in attrs.fields_dict(Tally):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Surroundings:
    """Decoys in folders, and staging folders among them."""

    def __init__(self, *places: tuple[Path, str]) -> None:
        """Plants decoys in each folder for a target in it."""
        self.folders = [folder for folder, _ in places]
        self._decoys = [path for folder, target in places for path in plant(folder, target)]
        self._names = {str(path) for path in self._decoys}
        self._before: dict[Path, Any] = look(self._decoys)

    def problems(self) -> list[str]:
        """Decoys that were touched."""
        now = look(self._decoys)
        touched = sorted(str(path) for path in now.keys() | self._before.keys() if self._differs(path, now))
        return [f"touched: {path}" for path in touched]

    def staged(self, *, whole: bool = False) -> list[Path]:
        """The staging folders; with `whole` only those of folders, not of single files."""
        found = []  # strings and os.path: this is asked thousands of times a second
        for folder in map(str, self.folders):
            with suppress(FileNotFoundError):
                names = [name for name in os.listdir(folder) if name.startswith(PREFIX)]
                found += [path for name in names if (path := f"{folder}/{name}") not in self._names]
        return [Path(path) for path in found if not whole or os.path.isdir(f"{path}/{NEW}")]

    def left(self, tally: Tally) -> list[str]:
        """After a process has come to its end: staging folders that it should have cleared away."""
        problems = []
        for path in self.staged():
            names = {file.name for file in entries(path)}
            if not names:
                tally.unmarked += 1
                shutil.rmtree(path)
            elif not {NEW, OLD} <= names:  # those stay where somebody took the target's name meanwhile
                problems.append(f"left behind: {path} with {sorted(names)}")
        return problems

    def _differs(self, path: Path, now: dict[Path, Any]) -> bool:
        return now.get(path) != self._before.get(path)


def entries(folder: Path) -> list[Path]:
    """What is in a folder, if there is one."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def wait(
    holds: Callable[[], bool], process: subprocess.Popen, end: float, within: float | None = None
) -> bool:
    """Whether it came to hold; False at the process's end or after `within` seconds."""
    until = end if within is None else time.monotonic() + within
    while time.monotonic() < until:
        if holds():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0003)
    if within is None:
        raise RuntimeError(f"process {process.pid} did not come to its moment in {PATIENCE:.0f} s")
    return False
