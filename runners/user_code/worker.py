"""A separate process for user code. The process can be ended in any state, and ends with the run.

The process is persistent, so a call costs only one message in each direction. Arguments are sent as
pickles, and results are returned as JSON. The process leads its own session, so Ctrl-C in the
terminal does not reach it or its children.
"""

import itertools
import json
import os
import pickle
import queue
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from math import inf
from multiprocessing.connection import Pipe
from typing import Any

import attrs

from runners.errors import RewardError, UserError, error_line
from runners.machine.bounded_process import python_command
from runners.user_code.process import LARGEST, MAIN, THREAD, Outcome

_LOOK = 0.05  # seconds between two calls of `check`
GRACE = 2.0  # seconds that a call may take to end after it is cancelled
_RELOADING = 600.0  # limit in seconds for importing the user's files again
# A shell leads the process group. The run holds the shell's standard input, which closes when the
# run ends for any reason; the shell then kills the group.
_GUARD = '"$@" & exec >/dev/null; read _; kill -KILL 0'
_SERVE = "from runners.user_code.process import serve; serve(*sys.argv[1:])"
_numbers = itertools.count(1)


@attrs.define(eq=False)
class Call:
    """A started call."""

    mode: str
    timeout: float = 0.0  # seconds; 0 means no limit
    latest: float = inf  # deadline on the monotonic clock
    number: int = attrs.field(factory=_numbers.__next__)
    outcome: Future[Outcome] = attrs.field(factory=Future)


class _Process:
    """One process, and two threads that exchange messages with it: one sends, the other
    receives.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.dead = ""  # reason why the process ended
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection, theirs = Pipe()
        stdout = os.dup(1)  # the process's standard output is its end of the connection
        with theirs:
            self._process = subprocess.Popen(
                ["sh", "-c", _GUARD, "sh", *python_command(_SERVE), str(stdout)],
                stdin=subprocess.PIPE,
                stdout=theirs.fileno(),
                pass_fds=[stdout],
                start_new_session=True,
            )
        os.close(stdout)
        _PROCESSES.add(self)
        for act in (self._send, self._receive):
            threading.Thread(target=act, name="grpo-worker", daemon=True).start()

    def start(self, call: Call, name: str, arguments: bytes) -> None:
        self.calls[call.number] = call
        self._messages.put(pickle.dumps((call.number, call.mode, name, arguments)))
        if self.dead:
            self._end_all()

    def cancel(self, call: Call) -> None:
        """Cancels a call. If the call has not ended after GRACE seconds, the process is killed."""
        if call.number in self.calls:
            self._messages.put(pickle.dumps((call.number, call.mode, "", b"")))
            if wait([call.outcome], GRACE).not_done:
                self.kill("a call exceeded its time limit and could not be interrupted")

    def kill(self, why: str = "the run has ended") -> None:
        """Kills the process and its children."""
        self.dead = self.dead or why
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._messages.put(None)

    def leave(self) -> None:
        """Closes the child's copy of the pipe in a forked child of the run, so that only the run
        can end the process.
        """
        self._process.returncode = 0
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._connection.close()

    def _send(self) -> None:
        with suppress(OSError):
            for message in iter(self._messages.get, None):
                self._connection.send_bytes(message)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, *outcome = json.loads(self._connection.recv_bytes(LARGEST + 1024))
                self._end(number, Outcome(*outcome))
        self.kill("the previous process ended by itself (os._exit, a crash)")
        self._end_all()

    def _end(self, number: int, outcome: Outcome) -> None:
        call = self.calls.pop(number, None)
        if call is not None:
            call.outcome.set_result(outcome)

    def _end_all(self) -> None:
        for number in list(self.calls):
            self._end(number, Outcome(fault="its process ended", ended=True))


_PROCESSES: weakref.WeakSet[_Process] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [each.leave() for each in _PROCESSES])


class Worker:
    """Manages the process for user code: starts it when needed, and restarts it after it has ended.

    A call names an operation: a function `package.module:name` in this package, which receives the
    process's store and the call's arguments. `notices` are messages about restarts that the caller
    should report.
    """

    def __init__(self) -> None:
        """Starts without a process."""
        self.notices: list[str] = []
        self._loads: dict[tuple[Any, ...], Call] = {}
        self._process: _Process | None = None
        self._starting = threading.RLock()  # only one thread restarts the process

    def preload(self, name: str, *arguments: Any) -> None:
        """Starts an operation that later calls depend on. Each new process repeats the
        operation.
        """
        if (name, *arguments) not in self._loads:
            self._loads[name, *arguments] = self.submit(name, *arguments, mode=MAIN)

    def load(self, name: str, *arguments: Any) -> Any:
        """Preloads an operation, waits for it, and returns its result. Raises UserError if the
        operation fails.
        """
        self.preload(name, *arguments)
        try:
            return self._loaded((name, *arguments))
        except UserError:
            del self._loads[name, *arguments]  # a new process does not repeat the operation
            raise

    def submit(self, name: str, *arguments: Any, mode: str) -> Call:
        """Starts a call, whose outcome is available later."""
        call = Call(mode)
        with self._starting:
            self._running().start(call, name, pickle.dumps(arguments))
        return call

    def cancel(self, call: Call) -> None:
        """Cancels a call."""
        if self._process is not None:
            self._process.cancel(call)

    def close(self) -> None:
        """Kills the process and all processes that it has started."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    def _running(self) -> _Process:
        if self._process is not None and not self._process.dead:
            return self._process
        before = self._process
        self._process = _Process()
        weakref.finalize(self, self._process.kill)
        if before is not None:
            self.notices.append(
                f"the reward and tool process was restarted and reloaded its files: {before.dead}"
            )
            for load in self._loads:
                self._loads[load] = self.submit(*load, mode=MAIN)
            try:
                for load in self._loads:
                    self._loaded(load, _RELOADING)
            except (UserError, TimeoutError) as error:
                raise RewardError(f"user code cannot be reloaded: {error_line(error)}") from error
        return self._process

    def _loaded(self, load: tuple[Any, ...], seconds: float | None = None) -> Any:
        outcome = self._loads[load].outcome.result(seconds)
        if outcome.fault:
            raise UserError(outcome.fault if outcome.refused else f"{load[1]}: {outcome.fault}")
        return outcome.value


class Calls:
    """Runs calls by key, one at a time per key. A call's time limit starts when the call starts."""

    def __init__(self, worker: Worker, workers: int = 0) -> None:
        """Limits the calls that run in threads at the same time to `workers`; 0 means no limit."""
        self.worker = worker
        self._workers = workers
        self._running: dict[Any, Call] = {}
        self._waiting: deque[tuple[Any, tuple[Any, ...], float]] = deque()

    def submit(self, key: Any, *operation: Any, timeout: float, mode: str = THREAD) -> None:
        """Starts an operation for a key, or queues it until a thread is free. For the operation's
        name and arguments, see `Worker`. A `timeout` of 0 means no limit.
        """
        if mode == THREAD and self._workers:
            self._waiting.append((key, operation, timeout))
            self._start_waiting()
        else:
            self._start(key, operation, timeout, mode)

    def collect(self, least: int, check: Callable[[], None] | None = None) -> Mapping[Any, Outcome]:
        """Waits until at least `least` outcomes are available, and returns the available outcomes
        by key.

        `check` is called during the wait; an exception from `check` ends the wait.
        """
        found: dict[Any, Outcome] = {}
        while True:
            now = time.monotonic()
            for key, call in list(self._running.items()):
                if call.outcome.done():
                    found[key] = self._running.pop(key).outcome.result()
                elif now >= call.latest:
                    self.worker.cancel(self._running.pop(key))
                    found[key] = Outcome(
                        fault=f"timed out after {call.timeout:g} s",
                        ended=True,
                        timed_out=True,
                        seconds=call.timeout,
                    )
            self._start_waiting()
            if len(found) >= least:
                return found
            latest = min((call.latest for call in self._running.values()), default=inf)
            if check is not None:
                check()
                latest = min(latest, time.monotonic() + _LOOK)
            rest = None if latest == inf else max(latest - time.monotonic(), 0.0)
            running = [call.outcome for call in self._running.values()]
            wait(running, rest, return_when=FIRST_COMPLETED)

    def _start_waiting(self) -> None:
        while self._waiting:
            if sum(each.mode == THREAD for each in self._running.values()) >= self._workers:
                return
            key, operation, timeout = self._waiting.popleft()
            self._start(key, operation, timeout, THREAD)

    def _start(self, key: Any, operation: tuple[Any, ...], timeout: float, mode: str) -> None:
        call = self.worker.submit(*operation, mode=mode)
        call.timeout = timeout
        call.latest = time.monotonic() + (timeout or inf)
        self._running[key] = call
