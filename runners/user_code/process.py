"""The process that runs user code for `worker.Worker`. It reads calls from a connection and answers
each call.

The main thread imports the user's files and calls plain rewards, because some code requires the
main thread. The process computes nothing for the run itself, and imports MLX only if the user's
code does.
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

LARGEST = 1 << 26  # maximum size of an answer in bytes

Act = Callable[[], Any]

# How a call runs. MAIN: in the main thread of the worker process, one call after another. THREAD:
# in a separate thread. TOGETHER: as a coroutine in the shared event loop.
MAIN = "main"
THREAD = "thread"
TOGETHER = "together"


@attrs.frozen(eq=False)
class Outcome:
    """A call's result, or its error."""

    value: Any = None
    fault: str = ""  # a one-line error message; empty if the call returned
    refused: bool = False  # whether the message is from a UserError
    # whether the call timed out, called sys.exit or ended its process
    ended: bool = False
    timed_out: bool = False
    seconds: float = 0.0

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """Returns the outcome for a call that raised an error."""
        if isinstance(error, UserError):
            return cls(fault=str(error), refused=True)
        return cls(fault=error_line(error), ended=isinstance(error, SystemExit))


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether calling the function returns a coroutine: the function is an ``async def``,
    or its class has an async ``__call__``.
    """
    # Every class has `__call__`; only whether it is async matters.
    method = getattr(type(function), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def finished(value: Any) -> Any:
    """Returns the value, or its awaited result if it is awaitable."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


class _Server:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()  # only one message is sent at a time
        self.pid = os.getpid()
        self.store: dict[Any, Any] = {}  # data that operations keep between calls
        self.main_calls: queue.SimpleQueue[tuple[int, Act]] = queue.SimpleQueue()
        self.main_thread = threading.get_ident()
        self.threads: dict[int, int] = {}  # thread id of each running call
        self.coroutines: dict[
            int, Future[Outcome]
        ] = {}  # coroutine of each call that is waiting for one
        self.loop = asyncio.new_event_loop()
        self.new_thread(self.loop.run_forever)

    def read(self) -> None:
        """Reads messages, and starts calls as they arrive. A message without an operation's name
        cancels a call that has exceeded its time limit.
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
            except RuntimeError as error:  # no more threads can be started
                self.answer(number, Outcome.failed(error), time.monotonic())

    def operate(self, name: str, arguments: bytes) -> Any:
        """Calls the function `package.module:function` of this package."""
        module, _, function = name.partition(":")
        operation = getattr(importlib.import_module(module), function)
        return operation(self.store, *pickle.loads(arguments))

    def run(self, number: int, act: Act, mode: str = MAIN) -> None:
        """Runs a call in the current thread. An awaitable result is awaited: for TOGETHER, in the
        shared event loop; otherwise in a separate loop, because the awaitable may block its loop.
        """
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
        """Awaits a coroutine, and returns its outcome. KeyboardInterrupt is caught too, because it
        would end the event loop that all calls share.
        """
        try:
            outcome = Outcome(await value)
        except BaseException as error:
            outcome = Outcome.failed(error)
        if os.getpid() != self.pid:
            # The call has forked, and this is the child, which must not use the parent's event
            # loop.
            os._exit(0)
        return outcome

    def cancel(self, number: int, mode: str) -> None:
        """Cancels a coroutine or interrupts Python code. A blocking call continues in its thread
        but is reported as ended, unless it blocks the main thread.
        """
        coroutine = self.coroutines.get(number)
        thread = self.threads.get(number)
        if coroutine:  # the call's thread answers, unless another coroutine blocks the loop
            self.loop.call_soon_threadsafe(coroutine.cancel)
        elif mode != MAIN:
            if thread:
                error = ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
            self.send(json.dumps([number, None, "the call was cancelled"]))
        elif thread:
            signal.pthread_kill(thread, signal.SIGINT)

    def interrupted(self, *_: Any) -> None:
        """Handles SIGINT: interrupts the main thread's call, which has exceeded its time limit. No
        signal may arrive while an answer is being sent.
        """
        if self.main_thread in self.threads.values():
            raise KeyboardInterrupt

    def new_thread(self, act: Callable[[], None]) -> None:
        """Starts a thread that runs `act`."""
        threading.Thread(target=act, name="grpo-call", daemon=True).start()

    def answer(self, number: int, outcome: Outcome, begun: float) -> None:
        """Sends an outcome as JSON, because parsing JSON runs no code."""
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
    """Runs calls until the connection, which is standard output, is closed. User code writes to the
    descriptor `stdout` instead.
    """
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
