"""Calls with time limits: what is late is given up, and the others are waited for."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import Any

import attrs

from runners.user_code.host import THREAD, Outcome
from runners.user_code.worker import Call, Worker

_LOOK = 0.05  # seconds between two calls of `check`


@attrs.frozen
class _Running:
    call: Call
    timeout: float
    latest: float  # its time limit, by the monotonic clock


class Calls:
    """Calls by key, of which one runs at a time for each. A time limit counts from a call's start."""

    def __init__(self, worker: Worker, workers: int = 0) -> None:
        """At most `workers` calls run in threads at a time; 0: any number."""
        self.worker, self._workers = worker, workers
        self._running: dict[Any, _Running] = {}
        self._done: queue.SimpleQueue[tuple[Any, Call]] = queue.SimpleQueue()
        self._waiting: deque[tuple[Any, tuple[Any, ...], float]] = deque()

    def submit(self, key: Any, *operation: Any, timeout: float, mode: str = THREAD) -> None:
        """Starts an operation (its name and arguments: see `Worker`) for a key; `timeout` 0: no limit."""
        if mode == THREAD and self._workers:
            self._waiting.append((key, operation, timeout))
            self._start_waiting()
        else:
            self._start(key, operation, timeout, mode)

    def collect(self, least: int, check: Callable[[], None] | None = None) -> Mapping[Any, Outcome]:
        """The available outcomes, by key; waits until there are at least `least`.

        `check` is called meanwhile; what it raises ends the waiting.
        """
        found: dict[Any, Outcome] = {}
        while True:
            while not self._done.empty():
                self._take(found, *self._done.get())
            now = time.monotonic()
            for key, running in list(self._running.items()):
                if now >= running.latest:
                    self._give_up(key)
                    fault = f"timed out after {running.timeout:g} s"
                    found[key] = Outcome(fault=fault, ended=True, timed_out=True, seconds=running.timeout)
            self._start_waiting()
            if len(found) >= least:
                return found
            latest = min((running.latest for running in self._running.values()), default=inf)
            if check is not None:
                check()
                latest = min(latest, time.monotonic() + _LOOK)
            rest = None if latest == inf else max(latest - time.monotonic(), 0.0)
            with suppress(queue.Empty):
                self._take(found, *self._done.get(timeout=rest))

    def _start_waiting(self) -> None:
        while self._waiting:
            if sum(each.call.mode == THREAD for each in self._running.values()) >= self._workers:
                return
            self._start(*self._waiting.popleft(), THREAD)

    def _start(self, key: Any, operation: tuple[Any, ...], timeout: float, mode: str) -> None:
        call = self.worker.submit(*operation, mode=mode)
        self._running[key] = _Running(call, timeout, time.monotonic() + (timeout or inf))
        call.outcome.add_done_callback(lambda _: self._done.put((key, call)))

    def _take(self, found: dict[Any, Outcome], key: Any, call: Call) -> None:
        if key in self._running and self._running[key].call is call:  # else it was given up
            found[key] = self._running.pop(key).call.outcome.result()

    def _give_up(self, key: Any) -> None:
        self.worker.cancel(self._running.pop(key).call)
