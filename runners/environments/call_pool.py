"""Calls of user code during decoding: in threads or in an event loop, each with a time limit."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs

from runners.errors import error_line

MAX_HUNG = 64  # hanging calls, each in its own thread, after which no new ones are started
_SLICE = 0.05  # seconds between checks for hanging calls


@attrs.frozen
class CallResult:
    """The outcome of a call."""

    value: Any = None
    fault: str = ""  # one line; empty: the call returned
    timed_out: bool = False
    seconds: float = 0.0


@attrs.define(eq=False)
class _Call:
    row: int
    act: Callable[[], Any]
    started: float | None = None  # when it was started; None: it waits for a worker
    done: bool = False  # returned or given up


class CallPool:
    """Runs calls for many rows; calls of coroutines are awaited together in one event loop.

    A call that exceeds its time limit is left in its daemon thread. Neither the pool nor the end of the
    process waits for it.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        """At most `workers` threads, without hanging ones; `timeout` in seconds per call, 0: no limit."""
        self._workers, self._timeout = workers, timeout
        self._results: queue.SimpleQueue[tuple[_Call, CallResult]] = queue.SimpleQueue()
        self._waiting: deque[_Call] = deque()
        self._calls: dict[int, _Call] = {}
        self._running = self._hung = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def hung(self) -> int:
        """The number of calls so far that exceeded their time limit."""
        return self._hung

    def submit(self, row: int, act: Callable[[], Any]) -> None:
        """Start a call for a row without a running one. If it returns an awaitable, that is awaited."""
        call = _Call(row, act)
        self._calls[row] = call
        with self._lock:
            self._waiting.append(call)
            start = self._running < self._workers and self._hung < MAX_HUNG
            self._running += start
        if start:
            threading.Thread(target=self._work, name="grpo-environment", daemon=True).start()
        elif self._hung >= MAX_HUNG and not self._running:
            self._results.put((call, CallResult(fault=f"not called: {MAX_HUNG} earlier calls still hang")))

    def submit_async(self, row: int, make: Callable[[], Awaitable[Any]]) -> None:
        """The same for a coroutine function, awaited in the shared loop."""
        call = _Call(row, make, started=time.monotonic())
        self._calls[row] = call
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="grpo-environment-loop", daemon=True).start()

        async def act() -> None:
            outcome = CallResult(fault="cancelled")
            begun = time.monotonic()
            try:
                value = await asyncio.wait_for(_awaited(make), self._timeout or None)
                outcome = CallResult(value, seconds=time.monotonic() - begun)
            except TimeoutError as error:
                late = bool(self._timeout) and time.monotonic() - begun >= self._timeout
                outcome = _late(self._timeout) if late else CallResult(fault=error_line(error))
            except BaseException as error:  # an error that is not an Exception would end the loop
                outcome = CallResult(fault=error_line(error), seconds=time.monotonic() - begun)
            finally:
                self._results.put((call, outcome))

        asyncio.run_coroutine_threadsafe(act(), self._loop)

    def collect(self, least: int) -> Mapping[int, CallResult]:
        """The available outcomes, by row; waits until there are at least `least`."""
        found: dict[int, CallResult] = {}
        while True:
            try:
                call, outcome = self._results.get(block=len(found) < least, timeout=_SLICE)
            except queue.Empty:
                self._give_up_on_late(found)
                if len(found) >= least:
                    return found
                continue
            if not call.done:
                call.done = True
                del self._calls[call.row]
                found[call.row] = outcome

    def _give_up_on_late(self, found: dict[int, CallResult]) -> None:
        if not self._timeout:
            return
        now = time.monotonic()
        for row, call in list(self._calls.items()):
            late = call.started is not None and now - call.started > self._timeout + _SLICE
            if not late or call.done:
                continue
            call.done = True
            del self._calls[row]
            found[row] = _late(self._timeout)
            with self._lock:
                self._hung += 1
                self._running -= 1
                start = bool(self._waiting) and self._running < self._workers and self._hung < MAX_HUNG
                self._running += start
            if start:
                threading.Thread(target=self._work, name="grpo-environment", daemon=True).start()
        if self._hung >= MAX_HUNG and not self._running:
            while self._waiting:
                waiting = self._waiting.popleft()
                self._results.put(
                    (waiting, CallResult(fault=f"not called: {MAX_HUNG} earlier calls still hang"))
                )

    def _work(self) -> None:
        """A worker: runs calls until none waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                call = self._waiting.popleft()
                call.started = time.monotonic()
            outcome = _attempt(call)
            with self._lock:
                given_up = call.done  # another worker has taken this one's place
            if given_up:
                return
            self._results.put((call, outcome))


def _attempt(call: _Call) -> CallResult:
    begun = time.monotonic()
    try:
        value = call.act()
        if isinstance(value, Awaitable):
            value = asyncio.run(_once(value))
        return CallResult(value, seconds=time.monotonic() - begun)
    except BaseException as error:  # including SystemExit and KeyboardInterrupt of the user's code
        return CallResult(fault=error_line(error), seconds=time.monotonic() - begun)


async def _once(value: Awaitable[Any]) -> Any:
    return await value


async def _awaited(make: Callable[[], Awaitable[Any]]) -> Any:
    return await make()


def _late(timeout: float) -> CallResult:
    return CallResult(fault=f"timed out after {timeout:g} s", timed_out=True, seconds=timeout)
