"""Displays a run: as plain lines, with a live line below them on a terminal, or not at all."""

import math
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO

from runners.errors import gigabytes, printable
from runners.machine.signals import to_stderr
from runners.machine.terminal import Output, echo
from runners.telemetry import events
from runners.telemetry.events import Event, Quiet, Report

__all__ = ["PlainReport", "Quiet", "Report"]

LINE_WIDTH = 100  # columns of a plain line
PAUSE = 30.0  # seconds between lines about a long activity
_LOOK = 3.0  # seconds between checks whether such a line is due
# The numbers at the end of an update's line: name on the display, name of the metric.
_SMALL = {"loss": "loss", "kl": "kl", "grad": "grad_norm"}


class PlainReport(Report):
    """Prints plain lines of at most 100 columns, without colour or cursor movement. Every
    `every`-th update gets a line.
    """

    def __init__(
        self, stream: TextIO, *, every: int = 1, clock: Callable[[], float] = time.monotonic
    ):
        """Writes to `stream`, which is flushed after each line. `clock` returns seconds."""
        self._stream = Output(stream)
        self._every = every
        self._clock = clock
        self.total = self.done = 0  # updates
        # has the results of the last evaluation
        self._evaluated: events.Started | events.Evaluated = events.Started(0, {})
        self._started = self._last_step = self._said = clock()  # `_said`: the last line
        self._step_times: deque[float] = deque(maxlen=21)  # seconds, without evaluations
        self._status = ""
        self._status_began = self._started
        self._advanced: events.Advanced | None = None  # the last one of this status
        self._over = threading.Event()

    @property
    def fault(self) -> Exception | None:
        """See `Report`."""
        return self._stream.fault

    def handle(self, event: Event) -> None:
        """See `Report.handle`. An alert is printed to standard error, because standard output may
        be a file."""
        match event:
            case events.Started():
                self.total = event.updates
                self.done = event.done
                self._evaluated = event
                self._started = self._last_step = self._said = self._clock()
                self._facts(event.header)
            case events.Status(text):
                self._status = text
                self._status_began = self._clock()
                self._advanced = None
            case events.Advanced():
                self._advanced = event
                self._remind()
            case events.Updated(metrics):
                self._last_step = self._clock()
                self._status = ""
                self._step_times.append(metrics.get("step_time", 0.0))
                self.done = int(metrics.get("update", self.done + 1))
                if self.done % self._every == 0 or self.done == self.total:
                    self._line(self._update_line(metrics))
            case events.Evaluated():
                self._status = ""
                if event.score is not None or event.reward is not None:
                    self._evaluated = event
                self._line(_eval_line(event))
            case events.Note(text):
                self._note(text)
            case events.Alert(text):
                to_stderr(text)
            case events.Finished(summary):
                self._line(f"finished in {duration_text(self.elapsed())}")
                self._facts(summary)

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._stream.flush()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def seconds_left(self) -> float | None:
        """Estimates the seconds until the last update from the recent pace. The estimate is None
        before the first update.
        """
        if not self._step_times:
            return None
        recent = [*self._step_times][1:] or self._step_times  # the first compiles, and is slower
        pace = sum(recent) / len(recent)
        return max(pace * (self.total - self.done) - (self._clock() - self._last_step), 0.0)

    def activity(self) -> str:
        """Returns the current activity with its progress and elapsed time, or an empty text if
        there is none.
        """
        if not self._status:
            return ""
        spent = duration_text(self._clock() - self._status_began)
        event = self._advanced
        progress = f": {event.what} {event.done:,} of {event.total:,}," if event else ""
        return f"{self._status}{progress} {spent}"

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            self._remind()

    def _remind(self) -> None:
        """Prints the current activity if nothing was printed for a long time."""
        if self._status and self._clock() >= self._said + PAUSE:
            self._line(self.activity())

    @property
    def _columns(self) -> int:
        return LINE_WIDTH

    def _update_line(self, metrics: Mapping[str, Any]) -> str:
        """Returns the line for an update. The least important parts are omitted if the line is too
        long.
        """
        score = self._evaluated.score
        headline = f"em {percent_text(score)}"
        if score is None and self._evaluated.reward is not None:  # there are no reference answers
            headline = f"held-out reward {number_text(self._evaluated.reward)}"
        rate = metrics.get("tokens_per_second", 0.0)
        speed = f"{rate / 1e3:.1f}k" if rate >= 1e3 else f"{rate:.0f}"
        memory = 1e9 * metrics.get("memory/peak_gb", 0.0)
        parts = [
            *(_measured(metrics, {"reward": "reward"}) or ["supervised"]),
            *_measured(metrics, {"length penalty": "length_penalty"}),
            headline,
            f"{speed} tok/s" if rate else "",
            gigabytes(memory) if memory else "",
            f"{duration_text(self.seconds_left())} left",
            *_measured(metrics, _SMALL),
        ]
        line = f"update {self.done:>{len(str(self.total))}}/{self.total}"
        for part in filter(None, parts):
            if len(line) + 2 + len(part) <= self._columns:
                line += f"  {part}"
        return line

    def _note(self, text: str) -> None:
        if self.fault:
            echo(text, err=True)
            return
        lines = textwrap.wrap(text, self._columns, subsequent_indent="  ", break_long_words=False)
        for line in lines or [""]:
            self._line(line)

    def _facts(self, rows: Mapping[str, Any]) -> None:
        indent = max((len(name) for name in rows), default=0) + 2
        for name, value in rows.items():
            shown = number_text(value) if isinstance(value, float) else value
            self._note(f"{name:<{indent}}{shown}")

    def _line(self, text: str) -> None:
        self._said = self._clock()
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()


def number_text(value: float | None) -> str:
    """Formats a number with up to three significant digits, such as 0.0123, -1.23, 123 or 3.1e-04.
    NaN becomes "nan", and None becomes "-".
    """
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return str(value).removesuffix(".0")
    if abs(value) >= 100:
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"
    return f"{value:#.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def percent_text(score: float | None) -> str:
    """Formats a share from 0 to 1 as a percentage such as 52.0%. None becomes "-"."""
    return "-" if score is None else f"{100 * score:.1f}%"


def duration_text(seconds: float | None) -> str:
    """Formats a duration, such as 0:41, 12:05 or 1:02:03. None becomes "-"."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _measured(metrics: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Returns the metrics in `names` (shown name -> key) that were measured, with their values."""
    return [f"{name} {number_text(metrics[key])}" for name, key in names.items() if key in metrics]


def _eval_line(event: events.Evaluated) -> str:
    parts = []
    if event.score is not None:
        parts.append(f"exact match {percent_text(event.score)} ({event.correct} of {event.total})")
    if event.reward is not None:
        count = "" if parts else f" ({event.total} prompts)"
        parts.append(f"reward {number_text(event.reward)}{count}")
    measured = ", ".join(parts) or "nothing was measured"
    return f"eval {event.name}: {measured} in {event.seconds:.1f} s"
