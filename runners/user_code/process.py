"""The process that runs user code for `worker.Worker`: reads calls from a connection, and answers each.

Its main thread imports the user's files and calls plain rewards, so that what needs a main thread works. It
computes nothing for the run, and imports no MLX unless the user's code does.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import attrs

from runners.errors import error_line
from runners.user_code.host import MAIN, Host, Outcome

LARGEST = 1 << 26  # bytes of an answer


def operation(name: str) -> Any:
    """The function `package.module:function` of this package."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


class _Server:
    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()
        self.store: dict[Any, Any] = {}  # what operations keep from call to call
        self.host = Host(self.answer)
        self.calls: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()  # for the main thread
        self.current: int | None = None  # the call that runs there

    def read(self) -> None:
        """Starts calls as they come; without a mode it is a call that is too late."""
        while True:
            number, mode, name, arguments = pickle.loads(self.connection.recv_bytes())

            def act(name: str = name, arguments: bytes = arguments) -> Any:
                return operation(name)(self.store, *pickle.loads(arguments))

            if mode == MAIN:
                self.calls.put((number, act))
            elif mode:
                self.host.start(number, act, mode)
            else:
                if number == self.current:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                else:
                    self.host.cancel(number)
                self.send([number])

    def run(self) -> None:
        """The main thread: one call after another."""
        while True:
            number, act = self.calls.get()

            def watched(number: int = number, act: Any = act) -> Any:
                self.current = number
                try:
                    return act()
                finally:
                    self.current = None

            self.host.run(number, watched)

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """SIGINT: the current call is too late. None may come amid an answer."""
        if self.current is not None:
            raise KeyboardInterrupt

    def answer(self, number: int, outcome: Outcome) -> None:
        """Sends an outcome."""
        self.send([number, *attrs.astuple(outcome, recurse=False)])

    def send(self, message: list[Any]) -> None:
        """A message in JSON, which runs nobody's code where it is read."""
        fault = f"returned more than {LARGEST:,} bytes"
        try:
            data = json.dumps(message).encode()
        except (TypeError, ValueError, RecursionError) as error:  # an integer of 5,000 digits
            data, fault = b"", error_line(error)
        if not data or len(data) > LARGEST:
            data = json.dumps([message[0], *attrs.astuple(Outcome(fault=fault), recurse=False)]).encode()
        try:
            with self.lock:
                self.connection.send_bytes(data)
        except OSError:  # the run has ended, or a call has closed the connection
            os._exit(1)


def serve(stdout: str) -> None:
    """Runs until the connection, which is standard output, is closed; `stdout` is what takes its place."""
    connection = Connection(os.dup(1))
    os.dup2(int(stdout), 1)
    os.close(int(stdout))
    faulthandler.enable()  # a crash shows where it was
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
    server.run()
