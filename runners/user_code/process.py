"""The process that runs user code for `worker.Worker`: reads calls from a connection and answers
each one.

Its main thread imports the user's files and calls plain rewards, for code that requires the main
thread. It computes nothing for the run, and imports MLX only if the user's code does.
"""

import asyncio
import ctypes
import faulthandler
import functools
import importlib
import inspect
import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Self

import attrs

from runners.errors import UserError, error_line

LARGEST = 1 << 26  # largest answer in bytes

Act = Callable[[], Any]

# How a call runs. MAIN: in the main thread of the worker process, one call after another. THREAD:
# in a separate thread. TOGETHER: as a coroutine in the shared event loop.
MAIN = "main"
THREAD = "thread"
TOGETHER = "together"


@attrs.frozen(eq=False)
class Outcome:
    """The outcome of a call."""

    value: Any = None
    fault: str = ""  # a message of one line; empty if the call returned
    refused: bool = False  # whether the fault is a UserError's message
    # whether it was too slow, called sys.exit or ended its process
    ended: bool = False
    timed_out: bool = False
    seconds: float = 0.0

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """The outcome of a call that raised."""
        if isinstance(error, UserError):
            return cls(fault=str(error), refused=True)
        return cls(fault=error_line(error), ended=isinstance(error, SystemExit))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function returns a coroutine: an ``async def``, or an object with one."""
    # Every class has this method; only its kind matters.
    method = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def finished(value: Any) -> Any:
    """Returns the value, after awaiting it if it is awaitable."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


class _Server:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()  # one message is sent at a time
        self.pid = os.getpid()
        self.store: dict[Any, Any] = {}  # data that operations keep between calls
        self.main_calls: queue.SimpleQueue[tuple[int, Act]] = queue.SimpleQueue()
        self.main_thread = threading.get_ident()
        self.threads: dict[int, int] = {}  # thread of each running call
        self.coroutines: dict[
            int, Future[Outcome]
        ] = {}  # coroutine of each call that waits for one
        self.loop = asyncio.new_event_loop()
        self.new_thread(self.loop.run_forever)

    def read(self) -> None:
        """Starts calls as they arrive. A message without an operation's name means that a call has
        exceeded its time limit.
        """
        while True:
            number, mode, name, arguments = pickle.loads(self.connection.recv_bytes())
            act = functools.partial(self.operate, name, arguments)
            try:
                if not name:
                    self.cancel(number, mode)
                elif mode == MAIN:
                    self.main_calls.put((number, act))
                else:
                    self.new_thread(functools.partial(self.run, number, act, mode))
            except RuntimeError as error:  # no more threads
                self.answer(number, Outcome.failed(error), time.monotonic())

    def operate(self, name: str, arguments: bytes) -> Any:
        """Calls the function `package.module:function` of this package."""
        module, _, function = name.partition(":")
        operation = getattr(importlib.import_module(module), function)
        return operation(self.store, *pickle.loads(arguments))

    def run(self, number: int, act: Act, mode: str = MAIN) -> None:
        """Runs a call in the current thread. Awaits results that are awaitable: in the shared event
        loop with TOGETHER, otherwise in a separate one, because other awaitables may block it."""
        begun = time.monotonic()
        self.threads[number] = threading.get_ident()
        try:
            try:
                value = act()
                if mode == TOGETHER and inspect.isawaitable(value):
                    waiting = asyncio.run_coroutine_threadsafe(self.wait(value), self.loop)
                    self.coroutines[number] = waiting
                    outcome = waiting.result()
                else:
                    outcome = Outcome(finished(value))
            finally:
                self.threads.pop(number, None)
                self.coroutines.pop(number, None)
        except BaseException as error:  # includes the user's SystemExit and KeyboardInterrupt
            outcome = Outcome.failed(error)
        self.answer(number, outcome, begun)

    async def wait(self, value: Awaitable[Any]) -> Outcome:
        """The outcome of a coroutine. KeyboardInterrupt is included, because it would end the event
        loop of all calls.
        """
        try:
            outcome = Outcome(await value)
        except BaseException as error:
            outcome = Outcome.failed(error)
        if os.getpid() != self.pid:
            # This is a child forked by the call; it must not use the parent's event loop.
            os._exit(0)
        return outcome

    def cancel(self, number: int, mode: str) -> None:
        """Ends a call that is a coroutine or runs Python code. A blocking call continues; it is
        reported as ended unless it blocks the main thread.
        """
        coroutine = self.coroutines.get(number)
        thread = self.threads.get(number)
        if coroutine:  # its thread answers unless another coroutine blocks the loop
            self.loop.call_soon_threadsafe(coroutine.cancel)
        elif mode != MAIN:
            error = ctypes.py_object(SystemExit)  # ignored for 0, which is no thread
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), error)
            self.send(json.dumps([number, None, "the call was cancelled"]))
        elif thread:
            signal.pthread_kill(thread, signal.SIGINT)

    def interrupted(self, *_: Any) -> None:
        """Handles SIGINT: ends the main thread's call, which has exceeded its time limit. No signal
        may arrive while an answer is sent.
        """
        if self.main_thread in self.threads.values():
            raise KeyboardInterrupt

    def new_thread(self, act: Callable[[], None]) -> None:
        """Runs `act` in a thread."""
        threading.Thread(target=act, name="grpo-call", daemon=True).start()

    def answer(self, number: int, outcome: Outcome, begun: float) -> None:
        """Sends an outcome as JSON, because reading JSON runs no code."""
        timed = attrs.evolve(outcome, seconds=time.monotonic() - begun)
        try:
            data = json.dumps([number, *attrs.astuple(timed, recurse=False)])
        except (
            TypeError,
            ValueError,
            RecursionError,
        ) as error:  # such as an integer with 5,000 digits
            data = json.dumps([number, None, error_line(error)])
        if len(data) > LARGEST:
            data = json.dumps([number, None, f"returned more than {LARGEST:,} bytes"])
        self.send(data)

    def send(self, message: str) -> None:
        """Sends a message."""
        try:
            with self.lock:
                self.connection.send_bytes(message.encode())
        except OSError:  # the run has ended, or a call has closed the connection
            os._exit(1)


def serve(stdout: str) -> None:
    """Runs until the connection, which is standard output, is closed; `stdout` replaces it."""
    connection = Connection(os.dup(1))
    os.dup2(int(stdout), 1)
    os.close(int(stdout))
    faulthandler.enable()  # a crash prints its location
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    server = _Server(connection)
    signal.signal(signal.SIGINT, server.interrupted)

    def in_fork() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.close()

    os.register_at_fork(after_in_child=in_fork)

    def read() -> None:
        try:
            server.read()
        finally:
            os._exit(0)

    threading.Thread(target=read, name="grpo-read", daemon=True).start()
    while True:  # runs calls in the main thread, one after another
        number, act = server.main_calls.get()
        server.run(number, act)
