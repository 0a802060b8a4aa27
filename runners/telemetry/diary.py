"""A run's diary, events.jsonl: its start, its machine, its notices and its end."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from runners.config.loading import Config
from runners.errors import UserError, error_line, one_line
from runners.machine.memory_readings import read_memory
from runners.machine.signals import Stopped
from runners.machine.startup import Platform
from runners.machine.terminal import OutputLost
from runners.telemetry.display import Report

_PACKAGES = ("grpo_fn", "mlx", "mlx-lm", "transformers", "numpy")


class Diary(Report):
    """A `Report` that passes everything on to another one, and keeps what is worth reading later.

    Notices from before the start are written after the event "start". Times are seconds since 1970.
    """

    def __init__(
        self,
        report: Report,
        clock: Callable[[], float] = time.time,
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Passes everything on to `report`, within `whole()`: an interrupt would leave half a block there."""
        self._report: Any = _Whole(report, whole)
        self._alert, self._clock = report.alert, clock
        self._write: Callable[[Mapping[str, Any]], None] | None = None
        self._waiting: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._update = 0
        self._begun = False

    def open(self, write: Callable[[Mapping[str, Any]], None], facts: Mapping[str, Any]) -> None:
        """From now on events go to `write`. The event "start" contains `facts`."""
        self._facts = dict(facts)
        self._write = write

    def tell(self, kind: str, text: str) -> None:
        """An event that the display need not show."""
        self._event(kind, text=one_line(text, os.environ))

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Records how the block ended: "finished", "stopped" (by a signal) or "failed"."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            self._ended(error)
            raise
        self._event("end", state="finished")

    def end(self, error: BaseException) -> None:
        """The process is about to end with this exception, which nothing handles."""
        self._ended(error)
        self._report.__exit__(type(error), error, None)

    def _ended(self, error: BaseException) -> None:
        state, text = _end_of(error)
        self._event("end", state=state, text=one_line(text, os.environ))

    def start(
        self, total_updates: int, header: Mapping[str, Any], *, done: int = 0, scores: Sequence[float] = ()
    ) -> None:
        """See `Report.start`."""
        self._update, self._begun = done, True
        about = {str(name): str(value) for name, value in header.items() if name != "writes to"}
        self._event("start", updates=total_updates, resumed=done > 0, about=about, **self._facts)
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            self._event(record.pop("event"), **record | {"update": done})
        self._report.start(total_updates, header, done=done, scores=scores)

    def status(self, text: str) -> None:
        """See `Report.status`."""
        self._report.status(text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """See `Report.step`."""
        self._update = int(metrics.get("update", self._update + 1))
        self._report.step(metrics)

    def eval(self, name: str, score: float, correct: int, total: int, seconds: float) -> None:
        """See `Report.eval`."""
        self._report.eval(name, score, correct, total, seconds)

    def note(self, text: str) -> None:
        """See `Report.note`."""
        self._event("note", text=one_line(text, os.environ))
        self._report.note(text)

    def alert(self, text: str) -> None:
        """See `Report.alert`. Another thread may call this, so it is not recorded."""
        self._alert(text)

    def example(self, record: Mapping[str, Any]) -> None:
        """See `Report.example`."""
        self._report.example(record)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """See `Report.table`."""
        self._event("table", text=title, columns=list(columns), rows=[list(map(str, row)) for row in rows])
        self._report.table(title, columns, rows)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `Report.finish`."""
        self._report.finish(summary)

    @property
    def fault(self) -> Exception | None:
        """See `Report`."""
        return getattr(self._report, "fault", None)

    def __enter__(self) -> Self:
        self._report.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._report.__exit__(*error)

    def _event(self, kind: str, **more: Any) -> None:
        record = {"event": kind, "time": round(self._clock(), 3), "update": self._update} | more
        if self._write is not None and self._begun:
            self._write(record)
        else:
            self._waiting.append(record)


class _Whole:
    """Each method of a report within a context."""

    def __init__(self, report: Report, whole: Callable[[], AbstractContextManager[None]]) -> None:
        self._report, self._whole = report, whole

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._report, name)
        if not callable(found):
            return found

        def act(*given: Any, **named: Any) -> Any:
            with self._whole():
                return found(*given, **named)

        return act


def _end_of(error: BaseException) -> tuple[str, str]:
    """The final state of a run that ends with this exception, and the reason."""
    if isinstance(error, Stopped):
        return "stopped", f"signal {error.exit_code - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted at once, without saving"
    if isinstance(error, OutputLost):
        return "stopped", str(error)
    return "failed", str(error) if isinstance(error, UserError) else error_line(error)


def start_facts(config: Config, machine: Platform) -> dict[str, Any]:
    """The report's facts about machine and versions, and the keys that config or command line set."""
    memory = read_memory().total
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "backend": machine.backend,
        "device": machine.device,
        "cores": machine.cores,
        **({"blas": machine.blas} if machine.blas else {}),
        **({"memory_gb": round(memory / 1e9, 1)} if memory else {}),
    }
    given = sorted(".".join(path) for path in config.settings.origins) if config.settings else []
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "process": os.getpid(),
        "machine": found,
        "versions": {"python": sys.version.split()[0], **versions},
        "given": given,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
