"""A run's progress: the numbers of the display, and how they are formatted."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from runners.telemetry.events import Advanced, Evaluated, Event, Started, Status, Updated


def peak_memory() -> int:
    """The peak of MLX's memory in bytes; 0 if MLX is not in use."""
    if "mlx.core" not in sys.modules:
        return 0
    from runners.machine.memory_readings import read_memory

    return read_memory().peak


class Progress:
    """Derives a display's numbers from a run's events."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, memory: Callable[[], int] = peak_memory
    ) -> None:
        """Starts the clock. `clock` gives seconds, `memory` bytes."""
        self.total = self.done = 0  # updates
        self.metrics: Mapping[str, Any] = {}  # of the last update
        self.score: float | None = None  # of the last evaluation: exact match
        self.reward: float | None = None  # the same: the mean of the run's own rewards
        self.memory = 0
        self._read_memory, self._clock = memory, clock
        self._started = self._last_step = clock()
        self._steps = 0  # of this process
        self._evaluating = 0.0  # seconds of evaluation since the last step
        self._intervals: deque[float] = deque(maxlen=20)
        self._status, self._status_began = "", self._started
        self._advanced: Advanced | None = None  # the last one of this status

    def handle(self, event: Event) -> None:
        """Takes in an event; the clock starts again with the run."""
        match event:
            case Started():
                self.total, self.done = event.updates, event.done
                self.score, self.reward = event.score, event.reward
                self._started = self._last_step = self._clock()
            case Status(text):
                self._status, self._status_began, self._advanced = text, self._clock(), None
            case Advanced():
                self._advanced = event
            case Updated(metrics):
                self._status = ""
                self._step(metrics)
            case Evaluated():
                self._status = ""
                self.score = self.score if event.score is None else event.score
                self.reward = self.reward if event.reward is None else event.reward
                self._evaluating += event.seconds
        if isinstance(event, Updated | Evaluated):
            self.memory = max(self.memory, self._read_memory())

    def _step(self, metrics: Mapping[str, Any]) -> None:
        now = self._clock()
        interval = max(now - self._last_step - self._evaluating, 0.0)
        self._last_step, self._evaluating = now, 0.0
        if self._steps == 1:
            self._intervals.clear()  # the first update compiles: it is slower than the others
        self._intervals.append(interval)
        self._steps += 1
        self.metrics, self.done = metrics, int(metrics.get("update", self.done + 1))

    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def seconds_left(self) -> float | None:
        """Seconds until the last update at the recent pace; None before the first update."""
        if not self._intervals:
            return None
        pace = sum(self._intervals) / len(self._intervals)
        return max(pace * (self.total - self.done) - (self._clock() - self._last_step), 0.0)

    def activity(self) -> str:
        """The current activity, how far it has come, and its time so far; empty: there is none."""
        if not self._status:
            return ""
        spent, event = duration_text(self._clock() - self._status_began), self._advanced
        if event is None:
            return f"{self._status} {spent}"
        return f"{self._status}: {event.what} {event.done:,} of {event.total:,}, {spent}"

    @property
    def headline(self) -> tuple[str, str]:
        """The latest exact match, or the mean of the run's own rewards where there are no gold answers."""
        if self.score is None and self.reward is not None:
            return "held-out reward", number_text(self.reward)
        return "em", percent_text(self.score)


def number_text(value: float | None) -> str:
    """Up to three significant digits: 0.0123, -1.23, 123, 3.1e-04; "nan" as it is, "-" for None."""
    if value is None:
        return "-"
    if not math.isfinite(value) or value == 0:
        return str(value).removesuffix(".0")
    if abs(value) >= 100:
        return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.2e}"
    return f"{value:#.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def count_text(value: float | None) -> str:
    """A count in four characters or so: 950, 9.4k, 41.7k, 1.2M; "-" for None."""
    if value is None:
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def percent_text(score: float | None) -> str:
    """52.0% of a share in 0..1; "-" for None."""
    return "-" if score is None else f"{100 * score:.1f}%"


def duration_text(seconds: float | None) -> str:
    """0:41, 12:05, 1:02:03; "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_text(value: Any) -> str:
    """A header's or a summary's value as text."""
    return number_text(value) if isinstance(value, float) else str(value)


def eval_line(event: Evaluated) -> str:
    """An evaluation in one line."""
    found = []
    if event.score is not None:
        found.append(f"exact match {percent_text(event.score)} ({event.correct} of {event.total})")
    if event.reward is not None:
        found.append(f"reward {number_text(event.reward)}" + ("" if found else f" ({event.total} prompts)"))
    return f"eval {event.name}: {', '.join(found) or 'nothing was measured'} in {event.seconds:.1f} s"
