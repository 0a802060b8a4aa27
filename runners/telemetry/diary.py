"""Sends a run's events to its log and its display, and writes events.jsonl."""

import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runners.config.loading import Config
from runners.errors import UserError, error_line, one_line
from runners.files.run_files import EVENTS
from runners.machine.memory_readings import total_memory
from runners.machine.signals import Stopped
from runners.machine.startup import Platform
from runners.machine.terminal import OutputLost
from runners.machine.versions import installed_version
from runners.telemetry.events import Advanced, Alert, Event, Note, Report, Started, Status, Updated
from runners.telemetry.log import MetricsLog

_PACKAGES = ("grpo_fn", "mlx", "mlx-lm", "transformers", "numpy")


class Diary(Report):
    """Sends a run's events to its listeners (log and display), and records the important ones.

    Events that occur before the log exists are written once the log exists. Times are seconds since
    1970.
    """

    def __init__(self, report: Report) -> None:
        """Starts with one listener, the display `report`."""
        self._report = report
        self._log: MetricsLog | None = None
        self._early: list[dict[str, Any]] = []  # events from before the log exists
        self._facts: Mapping[str, Any] = {}
        self._update = 0

    def open(self, log: MetricsLog, facts: Mapping[str, Any]) -> None:
        """Adds the listener `log`, which receives events before the display. The event "start"
        contains `facts`.
        """
        self._log = log
        self._facts = facts
        log.write(EVENTS, self._early)

    def handle(self, event: Event) -> None:
        """Handles an event. An alert, which may come from another thread, affects only the
        display.
        """
        match event:
            case Started(updates, header, done):
                self._update = done
                about = {name: str(value) for name, value in header.items() if name != "writes to"}
                start = {"updates": updates, "resumed": done > 0, "about": about}
                self._record("start", start | dict(self._facts))
            case Updated(metrics):
                self._update = int(metrics.get("update", self._update + 1))
            case Note(text):
                self._record("note", {"text": one_line(text, os.environ)})
        if self._log is not None:
            self._log.handle(event)
        self._report.handle(event)

    def status(self, text: str) -> None:
        """Sends a `Status`."""
        self.handle(Status(text))

    def advanced(self, what: str, done: int, total: int) -> None:
        """Sends an `Advanced`."""
        self.handle(Advanced(what, done, total))

    def note(self, text: str) -> None:
        """Sends a `Note`."""
        self.handle(Note(text))

    def alert(self, text: str) -> None:
        """Sends an `Alert`."""
        self.handle(Alert(text))

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Records the outcome of the block: "finished", "stopped" (by a signal) or "failed"."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self._end(error)
            raise
        self._record("end", {"state": "finished"})

    @property
    def fault(self) -> Exception | None:
        """See `Report`."""
        return self._report.fault

    def _end(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, UserError) else error_line(error)
        if isinstance(error, Stopped):
            text = f"signal {error.exit_code - 128}"
        elif isinstance(error, KeyboardInterrupt):
            text = "interrupted immediately, without saving"
        stops = (Stopped, KeyboardInterrupt, OutputLost)
        state = "stopped" if isinstance(error, stops) else "failed"
        self._record("end", {"state": state, "text": one_line(text, os.environ)})

    def _record(self, kind: str, facts: dict[str, Any]) -> None:
        record = {"event": kind, "time": round(time.time(), 3), "update": self._update} | facts
        if self._log is None:
            self._early.append(record)
        else:
            self._log.write(EVENTS, [record])


def start_facts(config: Config, machine: Platform) -> dict[str, Any]:
    """Returns facts for the report: machine, versions, and the keys set by the config or the
    command line.
    """
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "backend": machine.backend,
        "device": machine.device,
        "cores": machine.cores,
        "blas": machine.blas,
        "memory_gb": round(total_memory() / 1e9, 1),
    }
    versions = {name: installed_version(name) or "not installed" for name in _PACKAGES}
    return {
        "machine": {name: value for name, value in facts.items() if value},
        "versions": {"python": platform.python_version(), **versions},
        "given": sorted(map(".".join, config.settings.origins if config.settings else ())),
    }
