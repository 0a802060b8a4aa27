"""The time of an update by part, in seconds; the parts add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = ("rollout", "reward", "learner", "update", "sync", "checkpoint")


class PartTimes:
    """Seconds of each part since the clock was started."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts the clock."""
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._started = clock()

    def add(self, part: str, seconds: float) -> None:
        """Adds time of one of PARTS that was measured elsewhere."""
        self._seconds[part] += seconds

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Adds the time of the `with` block to one of PARTS."""
        started = self._clock()
        try:
            yield
        finally:
            self.add(part, self._clock() - started)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The time of the `with` block counts for no step."""
        started = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - started

    def take(self) -> dict[str, float]:
        """`step_time`, `time/PART` of each part and `time/rest` in seconds; counting restarts at 0."""
        now = self._clock()
        whole, self._started = now - self._started, now
        parts: dict[str, float] = self._seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        rest = whole - sum(parts.values())
        return {"step_time": whole, **{f"time/{part}": s for part, s in parts.items()}, "time/rest": rest}
