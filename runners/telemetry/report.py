"""The display of a run: a live block on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

from runners.errors import gigabytes
from runners.machine.signals import to_stderr
from runners.machine.terminal import Output, aligned, echo, visible
from runners.telemetry.events import (
    Advanced,
    Alert,
    Evaluated,
    Event,
    Finished,
    Note,
    Quiet,
    Report,
    Silent,
    Started,
    Table,
    Updated,
)
from runners.telemetry.progress import (
    Progress,
    as_text,
    count_text,
    duration_text,
    eval_line,
    number_text,
    percent_text,
)

__all__ = ["PlainReport", "Quiet", "Report", "Silent", "make_report"]

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
                done = self._progress.done
                if done % self._every == 0 or done == self._progress.total:
                    self._line(step_line(self._progress))
            case Evaluated():
                self._line(eval_line(event))
            case Note(text):
                self._note(text)
            case Alert(text):
                to_stderr(text)
            case Table():
                self._table(event)
            case Finished(summary):
                self._line(f"finished in {duration_text(self._progress.elapsed())}")
                self._facts(summary)
            case _:
                pass

    def __exit__(self, *error: object) -> None:
        self._stream.flush()

    def _note(self, text: str) -> None:
        if self.fault:
            echo(text, err=True)
            return
        for line in textwrap.wrap(text, LINE_WIDTH, subsequent_indent="  ", break_long_words=False) or [""]:
            self._line(line)

    def _table(self, table: Table) -> None:
        """Columns are aligned: the first and the last to the left, numbers to the right."""
        self._note(table.title)
        for line in aligned([table.columns, *table.rows], right=range(1, len(table.columns) - 1)):
            self._line(f"  {line}")

    def _facts(self, rows: Mapping[str, Any]) -> None:
        indent = max((len(name) for name in rows), default=0) + 2
        for name, value in rows.items():
            self._note(f"{name:<{indent}}{as_text(value)}")

    def _line(self, text: str) -> None:
        self._said = self._progress.elapsed()
        self._stream.write((visible(text) if self._stream.isatty() else text) + "\n")
        self._stream.flush()


def make_report(*, every: int = 1, stream: TextIO | None = None) -> Report:
    """A live block if `stream` (by default stdout) is a terminal that can move its cursor, else plain lines.

    NO_COLOR in the environment turns colours off, TERM=dumb the block. If standard output is closed, nothing
    is shown.
    """
    output: TextIO | None = stream or sys.stdout
    if output is None or output.closed:
        return Quiet()
    if output.isatty() and os.environ.get("TERM") != "dumb":
        from runners.telemetry.live import LiveReport

        return LiveReport(output)
    return PlainReport(output, every=every)


def step_line(progress: Progress) -> str:
    """One update in at most 100 columns; the least important parts are dropped first."""
    metrics = progress.metrics
    digits = len(str(progress.total))
    parts = [
        f"update {progress.done:>{digits}}/{progress.total}",
        f"reward {number_text(metrics.get('reward'))}",
        *(
            [f"length penalty {number_text(metrics['length_penalty'])}"]
            if "length_penalty" in metrics
            else []
        ),
        f"em {percent_text(progress.exact_match)}",
    ]
    if progress.tokens_per_second is not None:
        parts.append(f"{count_text(progress.tokens_per_second)} tok/s")
    if progress.memory:
        parts.append(gigabytes(progress.memory))
    parts.append(f"{duration_text(progress.seconds_left())} left")
    for name, key in (("loss", "loss"), ("kl", "kl"), ("grad", "grad_norm")):
        if key in metrics:
            parts.append(f"{name} {number_text(metrics[key])}")
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 2 + len(part) <= LINE_WIDTH:
            line += f"  {part}"
    return line
