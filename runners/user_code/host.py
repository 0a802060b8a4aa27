"""Runs calls in this process: in the main thread, in threads or in an event loop, with errors as values."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs

from runners.errors import UserError, error_line

# How a call runs. MAIN: one after another, in the main thread of a worker process; of this process's own
# calls, in a thread. THREAD: each in its own. TOGETHER: coroutines, in one event loop.
MAIN, THREAD, TOGETHER = "main", "thread", "together"
_LOOP_WAIT = 0.5  # seconds for an event loop to cancel a call before it counts as blocked


@attrs.frozen(eq=False)
class Outcome:
    """What came of a call."""

    value: Any = None
    fault: str = ""  # one line; empty: it returned
    refused: bool = False  # the fault is a UserError's message
    ended: bool = False  # it was too slow, called sys.exit or ended its process, instead of raising an error
    timed_out: bool = False
    seconds: float = 0.0


Done = Callable[[int, Outcome], None]


class Host:
    """Runs calls by their numbers; `done(number, outcome)` is called in the thread of each."""

    def __init__(self, done: Done) -> None:
        """`done` must not raise."""
        self._done = done
        self._threads: dict[int, int] = {}  # the threads of running calls
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}  # of calls that are awaited together
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, number: int, act: Callable[[], Any], mode: str = THREAD) -> None:
        """Starts a call. What `act` returns is awaited if it can be."""
        try:
            if mode == TOGETHER:
                loop = self._loops[number] = self._running_loop()
                loop.call_soon_threadsafe(self._begin, number, act, loop)
            else:
                self._new_thread(lambda: self.run(number, act))
        except RuntimeError as error:  # no more threads
            self._done(number, _failed(error))

    def run(self, number: int, act: Callable[[], Any]) -> None:
        """Runs a call in the current thread."""
        begun, process, outcome = time.monotonic(), os.getpid(), Outcome()
        self._threads[number] = threading.get_ident()
        try:
            outcome = Outcome(finished(act()))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt of the user's code
            outcome = _failed(error)
        finally:
            if os.getpid() != process:
                os._exit(0)  # a child that the call has forked, and that came back from it
            self._threads.pop(number, None)
            self._done(number, attrs.evolve(outcome, seconds=time.monotonic() - begun))

    def cancel(self, number: int) -> None:
        """Ends a call if it is a coroutine, or computes in Python; one that blocks goes on."""
        if number in self._loops:
            loop, reached = self._loops[number], threading.Event()

            def end() -> None:
                if number in self._tasks:
                    self._tasks[number].cancel()
                reached.set()

            with suppress(RuntimeError):  # it was closed
                loop.call_soon_threadsafe(end)
            if not reached.wait(_LOOP_WAIT) and loop is self._loop:
                self._loop = None  # the next calls get another
        elif thread := self._threads.get(number):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            loop = self._loop = asyncio.new_event_loop()

            def run() -> None:
                while not loop.is_closed():  # sys.exit in a task ends `run_forever`, not the other tasks
                    with suppress(BaseException):
                        loop.run_forever()

            self._new_thread(run)
        return self._loop

    def _begin(self, number: int, act: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        async def run() -> None:
            begun = time.monotonic()
            try:
                value = act()
                outcome = Outcome(await value if inspect.isawaitable(value) else value)
            except BaseException as error:
                outcome = _failed(error)
            end(attrs.evolve(outcome, seconds=time.monotonic() - begun))

        def end(outcome: Outcome) -> None:
            if self._tasks.pop(number, None):
                del self._loops[number]
                self._done(number, outcome)

        task = self._tasks[number] = loop.create_task(run())
        task.add_done_callback(lambda _: end(Outcome(fault="cancelled")))  # before it has begun

    def _new_thread(self, act: Callable[[], None]) -> None:
        threading.Thread(target=act, name="grpo-call", daemon=True).start()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine: an ``async def``, or an object with one."""
    method = getattr(type(function), "__call__", None)  # noqa: B004 (its kind is asked, not whether it exists)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _failed(error: BaseException) -> Outcome:
    if isinstance(error, UserError):
        return Outcome(fault=str(error), refused=True)
    return Outcome(fault=error_line(error), ended=isinstance(error, SystemExit))


def finished(value: Any) -> Any:
    """The value; one that can be awaited is awaited."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value
