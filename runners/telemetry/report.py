"""The display of a run: plain lines, on a terminal with a live one below them, or nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

from runners.errors import gigabytes
from runners.machine.signals import to_stderr
from runners.machine.terminal import Output, echo, visible
from runners.telemetry.events import (
    Advanced,
    Alert,
    Evaluated,
    Event,
    Finished,
    Note,
    Quiet,
    Report,
    Started,
    Updated,
)
from runners.telemetry.progress import (
    Progress,
    as_text,
    count_text,
    duration_text,
    eval_line,
    number_text,
)

__all__ = ["PlainReport", "Quiet", "Report"]

LINE_WIDTH = 100  # columns of a plain line
PAUSE = 30.0  # seconds between two lines about an activity that takes long


class PlainReport(Report):
    """Plain lines of at most 100 columns, without colour or cursor movement; one every `every` updates."""

    def __init__(self, stream: TextIO, *, every: int = 1, progress: Progress | None = None):
        """Writes to `stream`, flushing each line."""
        self._stream = Output(stream)
        self._every = every
        self._progress = progress or Progress()
        self._said = 0.0  # the time of the last line, in the run's seconds

    @property
    def fault(self) -> Exception | None:
        """See `Report`."""
        return self._stream.fault

    def handle(self, event: Event) -> None:
        """See `Report.handle`. An alert goes to standard error: standard output may be a file."""
        self._progress.handle(event)
        match event:
            case Started(header=header):
                self._facts(header)
            case Advanced() if self._progress.elapsed() >= self._said + PAUSE:
                self._line(self._progress.activity())
            case Updated():
                if self._progress.done % self._every == 0 or self._progress.done == self._progress.total:
                    self._line(step_line(self._progress, self._columns))
            case Evaluated():
                self._line(eval_line(event))
            case Note(text):
                self._note(text)
            case Alert(text):
                to_stderr(text)
            case Finished(summary):
                self._line(f"finished in {duration_text(self._progress.elapsed())}")
                self._facts(summary)

    def __exit__(self, *error: object) -> None:
        self._stream.flush()

    @property
    def _columns(self) -> int:
        return LINE_WIDTH

    def _note(self, text: str) -> None:
        if self.fault:
            echo(text, err=True)
            return
        for line in textwrap.wrap(text, self._columns, subsequent_indent="  ", break_long_words=False) or [
            ""
        ]:
            self._line(line)

    def _facts(self, rows: Mapping[str, Any]) -> None:
        indent = max((len(name) for name in rows), default=0) + 2
        for name, value in rows.items():
            self._note(f"{name:<{indent}}{as_text(value)}")

    def _line(self, text: str) -> None:
        self._said = self._progress.elapsed()
        self._stream.write((visible(text) if self._stream.isatty() else text) + "\n")
        self._stream.flush()


def step_line(progress: Progress, columns: int = LINE_WIDTH) -> str:
    """One update in so many columns; the least important parts are dropped first."""
    metrics = progress.metrics
    small = {"loss": "loss", "kl": "kl", "grad": "grad_norm"}
    penalty = metrics.get("length_penalty")
    parts = [
        f"reward {number_text(metrics.get('reward'))}" if "reward" in metrics else "supervised",
        "" if penalty is None else f"length penalty {number_text(penalty)}",
        " ".join(progress.headline),
        f"{count_text(rate)} tok/s" if (rate := metrics.get("tokens_per_second")) is not None else "",
        gigabytes(progress.memory) if progress.memory else "",
        f"{duration_text(progress.seconds_left())} left",
        *(f"{name} {number_text(metrics[key])}" for name, key in small.items() if key in metrics),
    ]
    line = f"update {progress.done:>{len(str(progress.total))}}/{progress.total}"
    for part in filter(None, parts):
        if len(line) + 2 + len(part) <= columns:
            line += f"  {part}"
    return line
