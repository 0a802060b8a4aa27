"""Runs functions in a separate process, with limits on time and memory."""

import atexit
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

_PATIENCE = 30.0  # seconds that a call may take in addition to ten times its CPU-time limit
# Not every system limits a process's address space; elsewhere, the parent reads the child's memory.
_CAN_LIMIT = sys.platform == "linux"
_POLL = 0.1  # seconds between two readings of the child's memory
_MAPPED = 200_000_000  # bytes that the child uses before the call


def python_command(code: str, *arguments: str) -> list[str]:
    """Returns a command that runs `code` in a new Python process with this process's import
    path.
    """
    # -P: prevents imports from the current folder that this process would not make itself.
    return [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path[:] = {sys.path!r}; {code}",
        *arguments,
    ]


class BoundedFunction:
    """Runs `package.module:function` in a persistent process, with limits on each call's time and
    memory.

    Arguments and results are plain values. A call returns None if it exceeds a limit, raises an
    exception or ends its process. `seconds` is the CPU-time limit, and `memory` is the memory limit
    in bytes. Only one thread uses the process at a time. A forked child starts its own process.
    """

    def __init__(self, name: str, *, seconds: float, memory: int) -> None:
        """Stores the limits. The process starts at `start` or at the first call."""
        self._arguments = (name, str(seconds), str(memory))
        self._patience = _PATIENCE + 10 * seconds
        self._most = memory + _MAPPED
        self._reset()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Starts the process if it is not running. The process imports the function's module in the
        background.
        """
        if self._running is None:
            ours, theirs = Pipe()
            code = f"from {__name__} import serve; serve(*sys.argv[1:])"
            with theirs:
                process = subprocess.Popen(
                    python_command(code, *self._arguments),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            self._running = process, ours
        return self._running

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function and returns its result, or None if the call failed or exceeded a
        limit.
        """
        with self._lock:
            try:
                process, connection = self.start()
                connection.send(arguments)
                end = time.monotonic() + self._patience
                while (rest := end - time.monotonic()) > 0:
                    if connection.poll(rest if _CAN_LIMIT else min(rest, _POLL)):
                        return connection.recv()
                    if not _CAN_LIMIT and _resident(process.pid) > self._most:
                        break
            except (EOFError, OSError):
                pass  # a limit or another process has ended the process
            except BaseException:  # an interrupt, possibly within a message
                self.close()
                raise
            self.close()
            return None

    def close(self) -> None:
        """Ends the process. The next call starts a new one."""
        if self._running is not None:
            process, connection = self._running
            self._running = None
            connection.close()
            process.kill()
            process.wait()


def serve(name: str, seconds: str, memory: str) -> None:
    """Answers calls in the child process, one after another, until the caller closes the
    connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    connection = Connection(os.dup(0))
    module, _, function = name.partition(":")
    target = getattr(importlib.import_module(module), function)
    limit_memory(int(memory))
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        # This timer's signal ends the process no matter what code is running.
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        try:
            found = target(*arguments)
        except BaseException:
            found = None
        signal.setitimer(signal.ITIMER_PROF, 0)  # no signal while the result is sent
        connection.send(found)


def limit_memory(memory: int) -> None:
    """Limits the child process to this many additional bytes of memory, if the system supports such
    a limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _CAN_LIMIT:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _resident(pid: int) -> int:
    """Returns the bytes of memory that a process holds, or 0 if unknown."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return int(done.stdout.strip() or 0) * 1024
