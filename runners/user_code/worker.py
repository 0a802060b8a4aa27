"""A process of its own for user code: it can be ended whatever it does, and ends with the run.

It is kept, so that a call costs a message there and back. Arguments go there as pickles; results come back as
JSON. It leads a session: Ctrl-C in the terminal does not reach it or its children.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import queue
import signal
import subprocess
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any

import attrs

from runners.errors import RewardError, UserError, error_line
from runners.machine.bounded_process import python_command
from runners.user_code.host import MAIN, TOGETHER, Outcome
from runners.user_code.process import LARGEST

GRACE = 2.0  # seconds in which the process has to react when a call is too late
_RELOADING = 600.0  # seconds for importing the user's files once more
# A shell leads the process group. The run holds its standard input: whatever ends the run closes that, and
# the shell ends the group, whatever the worker and its children are doing.
_GUARD = '"$@" & exec >/dev/null; read _; kill -KILL 0'
_SERVE = "from runners.user_code.process import serve; serve(*sys.argv[1:])"
_ENDED = Outcome(fault="its process was ended", ended=True)
_numbers = itertools.count(1)


@attrs.define(eq=False)
class Call:
    """A call that has been started."""

    mode: str
    number: int = attrs.field(factory=_numbers.__next__)
    outcome: Future[Outcome] = attrs.field(factory=Future)
    let_go: threading.Event = attrs.field(factory=threading.Event)  # it blocks no other call


class _Process:
    """One process, with a thread that sends to it and one that receives."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.dead = ""  # why it has ended
        self._owner = os.getpid()
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection, theirs = Pipe()
        stdout = os.dup(1)  # in its place the process gets its end of the connection
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
        """Gives a call up. The process is ended if it does not react, or if its main thread goes on."""
        if call.number in self.calls:
            self._messages.put(pickle.dumps((call.number, call.mode, "", b"")))
            if not call.let_go.wait(GRACE):
                self.kill("a call that took too long did not let go")

    def close_in_child(self) -> None:
        """In a forked child of the run: only the run itself holds the pipe whose end ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._connection.close()

    def kill(self, why: str = "the run has ended") -> None:
        """Ends the process and its children."""
        if os.getpid() != self._owner:  # a forked child of the run
            return
        self.dead = self.dead or why
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._messages.put(None)

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._connection.send_bytes(message)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, *rest = json.loads(self._connection.recv_bytes(LARGEST + 1024))
                call = self.calls.get(number)
                if rest:
                    self._end(number, Outcome(*rest))
                elif call is not None and call.mode != MAIN:  # it reacts to being given up
                    call.let_go.set()
                    if call.mode == TOGETHER:
                        self.calls.pop(number, None)
        self.kill("the one before ended by itself (os._exit, a crash)")
        self._end_all()

    def _end(self, number: int, outcome: Outcome) -> None:
        if call := self.calls.pop(number, None):
            call.let_go.set()
            call.outcome.set_result(outcome)

    def _end_all(self) -> None:
        for number in list(self.calls):
            self._end(number, _ENDED)


_PROCESSES: weakref.WeakSet[_Process] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [each.close_in_child() for each in _PROCESSES])


class Worker:
    """The process: started when it is needed, and again after it was ended.

    Calls name an operation, a function `package.module:name` of this package that gets the process's store
    and the arguments. `notices` are lines on restarts, for whoever reports.
    """

    def __init__(self) -> None:
        """Nothing is started yet."""
        self.notices: list[str] = []
        self._loads: dict[tuple[Any, ...], Call] = {}
        self._process: _Process | None = None

    def preload(self, name: str, *arguments: Any) -> None:
        """Begins an operation that later calls need; it is repeated in each new process."""
        if (name, *arguments) not in self._loads:
            self._loads[name, *arguments] = self.submit(name, *arguments, mode=MAIN)

    def load(self, name: str, *arguments: Any) -> Any:
        """The result of `preload`. Raises UserError if it fails."""
        self.preload(name, *arguments)
        try:
            return self._loaded((name, *arguments))
        except UserError:
            del self._loads[name, *arguments]  # a new process does without it
            raise

    def submit(self, name: str, *arguments: Any, mode: str) -> Call:
        """Starts a call; its outcome comes later."""
        call = Call(mode)
        self._running().start(call, name, pickle.dumps(arguments))
        return call

    def cancel(self, call: Call) -> None:
        """Gives a call up."""
        if self._process is not None:
            self._process.cancel(call)

    def close(self) -> None:
        """Ends the process and everything that it has started."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    def _running(self) -> _Process:
        if self._process is not None and not self._process.dead:
            return self._process
        before, self._process = self._process, _Process()
        weakref.finalize(self, self._process.kill)
        if before is not None:
            self.notices.append(
                "rewards and tools go on in a new process, which has imported their files again: "
                f"{before.dead}"
            )
            for load in self._loads:
                self._loads[load] = self.submit(*load, mode=MAIN)
            try:
                for load in self._loads:
                    self._loaded(load, _RELOADING)
            except (UserError, TimeoutError) as error:
                raise RewardError(f"user code cannot be loaded again: {error_line(error)}") from error
        return self._process

    def _loaded(self, load: tuple[Any, ...], seconds: float | None = None) -> Any:
        outcome = self._loads[load].outcome.result(seconds)
        if outcome.fault:
            raise UserError(outcome.fault if outcome.refused else f"{load[1]}: {outcome.fault}")
        return outcome.value
