"""Reads a run's config, metrics, events and state from its small files."""

import fcntl
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners.config.loading import load_config, recorded_in
from runners.errors import UserError
from runners.files.durable import disk_errors
from runners.files.json_files import finite_number, open_file, read_lines
from runners.files.run_files import EVENTS, LOCK, METRICS, RESOLVED

_MOST_EVENTS = 2000  # in a page
_TEXT = 2000  # characters of an event
_DIGITS = 1 << 53  # whole numbers below it are exact in a browser


class RunRecord:
    """The current state of a run's folder. Other processes may be writing to the folder."""

    def __init__(self, folder: Path) -> None:
        """Reads config, metrics and events. Raises UserError if the folder contains no run."""
        self.folder = find_run(folder)
        self.config: Mapping[str, Mapping[str, Any]] = recorded_in(self.folder)
        lines = list(read_lines(self.folder / METRICS))
        self.lines = len(lines)
        names = dict.fromkeys(itertools.chain.from_iterable(lines))
        columns = {name: [plain_number(line.get(name)) for line in lines] for name in names}
        self.columns = {name: column for name, column in columns.items() if {*column} != {None}}
        self.nonfinite: list[tuple[int, str]] = []
        for number, line in enumerate(lines):
            given = line.get("nonfinite")
            if isinstance(given, list):
                self.nonfinite += [(number, str(each)) for each in given]
        self.worse = str(lines[-1].get("worse", "") if lines else "")[:_TEXT]
        self.events = list(read_lines(self.folder / EVENTS))

    def last(self, name: str) -> float | None:
        """Returns a metric's last value, or None if it was never logged."""
        known = (value for value in reversed(self.columns.get(name, [])) if value is not None)
        return next(known, None)

    def state(self) -> str:
        """Returns the state: "running", "finished", "stopped", "failed", "interrupted" (the run
        ended without an event) or "empty".
        """
        marks = [each for each in self.events if each.get("event") in ("start", "end")]
        last = marks[-1] if marks else {}
        if last.get("event") == "end":
            state = last.get("state")
            return state if state in ("finished", "stopped", "failed") else "interrupted"
        if not last and os.path.isdir(self.folder / "final"):
            return "finished"  # the events are missing
        if is_running(self.folder):
            return "running"
        return "interrupted" if self.lines or self.events else "empty"

    def facts(self) -> dict[str, Any]:
        """Returns all data except the metrics, for the page's head."""
        starts = [event for event in self.events if event.get("event") == "start"]
        last = starts[-1] if starts else {}
        flat = flattened(self.config)
        return {
            "name": self.config.get("run", {}).get("name") or self.folder.name,
            "folder": self.folder.name,
            "state": self.state(),
            "updates": plain_number(last.get("updates")),
            "started": finite_number(starts[0].get("time")) if starts else None,
            **{name: _texts(last.get(name)) for name in ("about", "machine", "versions")},
            "config": flat,
            "different": different_keys(flat, last.get("given")),
            "events": [_event(event) for event in self.events[-_MOST_EVENTS:]],
        }


def plain_number(value: Any) -> float | int | None:
    """Returns a number rounded to seven significant digits (integers are exact), or None for
    anything but a finite number.

    True becomes 1, which metrics such as update_skipped need.
    """
    if isinstance(value, int) and abs(value) < _DIGITS:
        return int(value)
    number = finite_number(value)
    return None if number is None else float(f"{number:.7g}")


def find_run(folder: Path) -> Path:
    """Returns the folder if it contains a run. Otherwise raises UserError, with the names of the
    runs in its subfolders.
    """
    folder = folder.expanduser()
    if is_run_folder(folder):
        return folder
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: there is no such folder")
    with disk_errors(f"{folder}: cannot be read"):
        inside = [path.name for path in sorted(folder.iterdir()) if is_run_folder(path)]
    more = f"; it contains the runs {', '.join(inside[:8])}" if inside else ""
    raise UserError(
        f"{folder}: this is not a run's folder, because it contains neither {METRICS} nor "
        f"{RESOLVED}{more}"
    )


def is_run_folder(folder: Path) -> bool:
    """Returns whether a run has written its config or its log into a folder. Returns False for
    folders that cannot be read.
    """
    return any(os.path.isfile(folder / name) for name in (METRICS, RESOLVED))


def is_running(folder: Path) -> bool:
    """Returns whether a process holds the run's lock."""
    try:
        with open_file(folder / LOCK) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a config's values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def different_keys(flat: Mapping[str, Any], given: Any) -> list[str]:
    """Returns the keys whose values differ from the defaults. Keys that a preset sets are only
    included if they are in `given`.
    """
    defaults = flattened(load_config(None, ["model.path=none"]).to_dict())
    asked = given if isinstance(given, list) else []
    by_preset = {key for key in flat if key.startswith("loss.") and defaults.get(key) is None}

    def differs(key: str) -> bool:
        return key in asked if key in by_preset else defaults.get(key, {}) != flat[key]

    return list(filter(differs, flat))


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): str(each)[:_TEXT] for name, each in value.items()}


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event in the format for the page, even if the file's content is invalid."""
    kept: dict[str, Any] = {
        "event": str(event.get("event", "note"))[:40],
        "time": finite_number(event.get("time")),
        "update": plain_number(event.get("update")),
        "resumed": event.get("resumed") is True,
    }
    return kept | _texts({name: event[name] for name in ("text", "state") if name in event})
