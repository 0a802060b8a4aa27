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
from runners.user_code.worker import Worker

_LOOK = 0.05  # seconds between two calls of `check`


@attrs.frozen
class _Call:
    key: Any
    mode: str
    timeout: float
    latest: float  # its time limit, by the monotonic clock


class Calls:
    """Calls by key, of which one runs at a time for each. A time limit counts from a call's start."""

    def __init__(self, worker: Worker, workers: int = 0) -> None:
        """At most `workers` calls run in threads at a time; 0: any number."""
        self.worker = worker
        self._workers = workers
        self._results: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._running: dict[int, _Call] = {}
        self._waiting: deque[tuple[Any, str, tuple[Any, ...], float, str]] = deque()

    def submit(self, key: Any, name: str, *arguments: Any, timeout: float, mode: str = THREAD) -> None:
        """Starts an operation (see `Worker`) for a key; `timeout` in seconds, 0: none."""
        if mode == THREAD and self._workers:
            self._waiting.append((key, name, arguments, timeout, mode))
            self._start_waiting()
        else:
            self._start(key, name, arguments, timeout, mode)

    def collect(self, least: int, check: Callable[[], None] | None = None) -> Mapping[Any, Outcome]:
        """The available outcomes, by key; waits until there are at least `least`.

        `check` is called meanwhile; what it raises ends the waiting.
        """
        found: dict[Any, Outcome] = {}
        while True:
            while not self._results.empty():
                self._take(found, *self._results.get())
            now = time.monotonic()
            for number, call in list(self._running.items()):
                if now >= call.latest:
                    found[call.key] = self._give_up(number)
            self._start_waiting()
            if len(found) >= least:
                return found
            latest = min((call.latest for call in self._running.values()), default=inf)
            if check is not None:
                check()
                latest = min(latest, time.monotonic() + _LOOK)
            with suppress(queue.Empty):
                rest = None if latest == inf else max(latest - time.monotonic(), 0.0)
                self._take(found, *self._results.get(timeout=rest))

    def give_up(self, key: Any) -> None:
        """Waits for a key's call no longer."""
        self._waiting = deque(each for each in self._waiting if each[0] != key)
        for number, call in list(self._running.items()):
            if call.key == key:
                self._give_up(number)

    def _start_waiting(self) -> None:
        while self._waiting and sum(call.mode == THREAD for call in self._running.values()) < self._workers:
            self._start(*self._waiting.popleft())

    def _start(self, key: Any, name: str, arguments: tuple[Any, ...], timeout: float, mode: str) -> None:
        done = self._results.put
        number = self.worker.submit(name, *arguments, mode=mode, done=lambda *outcome: done(outcome))
        self._running[number] = _Call(key, mode, timeout, time.monotonic() + (timeout or inf))

    def _take(self, found: dict[Any, Outcome], number: int, outcome: Outcome) -> None:
        if number in self._running:  # else it was given up
            found[self._running.pop(number).key] = outcome

    def _give_up(self, number: int) -> Outcome:
        call = self._running.pop(number)
        self.worker.cancel(number)
        fault = f"timed out after {call.timeout:g} s"
        return Outcome(fault=fault, ended=True, timed_out=True, seconds=call.timeout)
