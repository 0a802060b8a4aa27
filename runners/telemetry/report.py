"""The display of a run: a live block on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from runners.errors import gigabytes
from runners.machine.signals import to_stderr
from runners.machine.terminal import Output, echo, visible
from runners.telemetry.display import Quiet, Report, Silent
from runners.telemetry.progress import (
    Progress,
    as_text,
    count_text,
    duration_text,
    eval_line,
    number_text,
    peak_memory,
    percent_text,
)

__all__ = ["PlainReport", "Quiet", "Report", "Silent", "make_report"]

LINE_WIDTH = 100  # columns of a plain line


class PlainReport(Report):
    """Plain lines of at most 100 columns, without colour or cursor movement; one every `every` updates."""

    def __init__(
        self,
        stream: TextIO,
        *,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], int] = peak_memory,
    ):
        """Writes to `stream`, flushing each line; `clock` gives seconds, `memory` bytes."""
        self._stream = Output(stream)
        self._every = every
        self._sources: dict[str, Any] = {"clock": clock, "memory": memory}
        self._progress = Progress(0, **self._sources)

    @property
    def fault(self) -> Exception | None:
        """See `Report`."""
        return self._stream.fault

    def start(
        self,
        total_updates: int,
        header: Mapping[str, Any],
        *,
        done: int = 0,
        scores: Sequence[float] = (),
    ) -> None:
        """See `Report.start`."""
        self._progress = Progress(total_updates, done=done, scores=scores, **self._sources)
        self._table(header)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """See `Report.step`."""
        self._progress.step(metrics)
        done = self._progress.done
        if done % self._every == 0 or done == self._progress.total:
            self._line(step_line(self._progress))

    def eval(self, name: str, score: float, correct: int, total: int, seconds: float) -> None:
        """See `Report.eval`."""
        self._progress.eval(score, seconds)
        self._line(eval_line(name, score, correct, total, seconds))

    def note(self, text: str) -> None:
        """See `Report.note`."""
        if self.fault:
            echo(text, err=True)
            return
        for line in textwrap.wrap(text, LINE_WIDTH, subsequent_indent="  ", break_long_words=False) or [""]:
            self._line(line)

    def alert(self, text: str) -> None:
        """See `Report.alert`: standard output may be a file."""
        to_stderr(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """See `Report.table`: columns are aligned, names at the left and numbers at the right."""
        self.note(title)
        cells = [tuple(columns), *map(tuple, rows)]
        widths = [max(map(len, column), default=0) for column in zip(*cells, strict=True)]
        for row in cells:
            first, *others = (
                cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            self._line("  ".join(["", first, *others]).rstrip())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `Report.finish`."""
        self._line(f"finished in {duration_text(self._progress.elapsed())}")
        self._table(summary)

    def __exit__(self, *error: object) -> None:
        self._stream.flush()

    def _table(self, rows: Mapping[str, Any]) -> None:
        indent = max((len(name) for name in rows), default=0) + 2
        for name, value in rows.items():
            self.note(f"{name:<{indent}}{as_text(value)}")

    def _line(self, text: str) -> None:
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
