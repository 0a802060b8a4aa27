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
        self.scores: list[float] = []  # of evaluations, in order: exact match
        self.held_out: list[float] = []  # the same: the mean of the run's own rewards
        self.memory = 0
        self._read_memory, self._clock = memory, clock
        self._started = self._last_step = clock()
        self._steps = 0  # of this process
        self._shortened = False  # the first of them, by rollouts that a checkpoint had
        self._evaluating = 0.0  # seconds of evaluation since the last step
        self._intervals: deque[float] = deque(maxlen=20)
        self._status, self._status_began = Status(""), self._started
        self._advanced: tuple[Advanced, float] | None = None  # the last one, and when it came
        self._phase_began = self._started  # what it names

    def handle(self, event: Event) -> None:
        """Takes in an event; the clock starts again with the run."""
        match event:
            case Started():
                self.total, self.done = event.updates, event.done
                self.scores, self.held_out = list(event.scores), list(event.rewards)
                self._started = self._last_step = self._clock()
                self._shortened = event.waiting
            case Status():
                self._status, self._status_began, self._advanced = event, self._clock(), None
            case Advanced(what, done, _):
                now, last = self._clock(), self._advanced
                if last is None or last[0].what != what or done < last[0].done:
                    self._phase_began = self._status_began if last is None else now
                self._advanced = event, now
            case Updated(metrics):
                self._status = Status("")
                self._step(metrics)
            case Evaluated():
                self._status = Status("")
                self.scores += [] if event.score is None else [event.score]
                self.held_out += [] if event.reward is None else [event.reward]
                self._evaluating += event.seconds
        if isinstance(event, Updated | Evaluated):
            self.memory = max(self.memory, self._read_memory())

    def _step(self, metrics: Mapping[str, Any]) -> None:
        now = self._clock()
        interval = max(now - self._last_step - self._evaluating, 0.0)
        self._last_step, self._evaluating = now, 0.0
        if self._steps == 1:
            self._intervals.clear()  # the first update compiles: it is slower than the others
        if self._steps or not self._shortened:
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
        """The current activity, how far it has come, and its time left; empty: there is none."""
        text, now = self._status.text, self._clock()
        if not text:
            return ""
        spent, line = now - self._status_began, text
        if self._advanced is not None:
            event, came = self._advanced
            line = f"{text}: {event.what} {event.done:,} of {event.total:,},"
        if self._advanced is None or not event.done:
            ahead = self._status.expected - spent
            if ahead > 0:
                return f"{line.removesuffix(',')}, about {duration_text(ahead)} left"
            return f"{line} {duration_text(spent)}"
        left = (came - self._phase_began) * (event.total - event.done) / event.done
        left += self._status.rest * (came - self._status_began + left) - (now - came)
        return f"{line} {duration_text(max(left, 0.0))} left"

    @property
    def headline(self) -> tuple[str, str]:
        """The latest exact match, or the mean of the run's own rewards where there are no gold answers."""
        if not self.scores and self.held_out:
            return "held-out reward", number_text(self.held_out[-1])
        return "exact match", percent_text(self.scores[-1] if self.scores else None)


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
