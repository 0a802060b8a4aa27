"""Runs an untrusted Python program, isolated from the network, files, processes and secrets.

On Linux, isolation uses namespaces or Landlock, and a system-call filter; on macOS, `sandbox-exec`.
The program can access only the standard library (read-only) and an empty folder. `confined.py` runs
inside the isolation, in one process per program that runs at the same time.
"""

import atexit
import functools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import attrs

from runners.errors import UserError
from runners.sandbox.system_calls import system_call_filter

_INSIDE = Path(__file__).with_name("confined.py")
_SCRATCH = "/scratch"  # the program's own folder on Linux
_GRACE = 5.0  # seconds that an answer may take after a program's time limit
WAITING = 5  # ratio of a program's wall-clock limit to its CPU-time limit


@attrs.frozen
class Limits:
    """Resource limits for a program."""

    seconds: float = 10.0  # wall-clock time from start to end, including waiting
    processor_seconds: float = 2.0  # CPU time of all threads together, rounded up to whole seconds
    memory: int = 512_000_000  # bytes of address space beyond what every program starts with
    threads: int = 8
    disk: int = 64_000_000  # bytes in the program's folder; on macOS, bytes per file
    output: int = 1_000_000  # bytes of output that are read; the rest is discarded
    partial: bool = False  # whether to run even if a protection is missing


DEFAULT = Limits()


@attrs.frozen
class Outcome:
    """A program's result and its output."""

    output: bytes  # the program's standard output, truncated at the limit
    code: int  # exit code
    processor_seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether a time limit ended the program."""
        return self.code == -signal.SIGKILL


class _Server:
    """A process that runs programs, one at a time. `missing` lists its missing protections."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.connection: Connection = ours
        folder = _SCRATCH
        shut: list[str] = []
        if sys.platform == "darwin":
            self.folder = tempfile.TemporaryDirectory(prefix="grpo-sandbox-")
            folder = os.path.realpath(self.folder.name)
            shut = ["sandbox-exec", "-p", _seatbelt(folder)]
        with theirs:
            self.process = subprocess.Popen(
                # A virtual environment's Python is a link to the real one.
                [*shut, os.path.realpath(sys.executable), "-I", "-S", "-B", str(_INSIDE)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    "HOME": folder,
                    "TMPDIR": folder,
                    "PATH": "/usr/bin:/bin",
                    "LC_ALL": "C.UTF-8",
                },
                cwd="/",
                start_new_session=True,
            )
        _servers.add(self)
        machine = platform.machine()
        filters = [system_call_filter(machine, own_files=own).hex() for own in (True, False)]
        greeting = self.ask(60.0, filters)
        self.missing: list[str] = ["a Python that starts in isolation"]
        if greeting is not None:
            self.missing = json.loads(greeting)

    def ask(self, seconds: float, *messages: Any) -> bytes | None:
        """Sends messages, and returns the answer. Returns None, and ends the process, if the
        process has ended or does not answer within `seconds`.
        """
        with suppress(EOFError, OSError):
            for message in messages:
                self.connection.send_bytes(json.dumps(message).encode())
            if self.connection.poll(seconds):
                return self.connection.recv_bytes()
        self.end()
        return None

    def end(self) -> None:
        """Kills the process and the program that it runs. A pending `ask` returns None."""
        _servers.discard(self)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


_servers: set[_Server] = set()
_idle: list[_Server] = []
# A forked child must not use these processes, which belong to its parent.
os.register_at_fork(after_in_child=lambda: [known.clear() for known in (_servers, _idle)])


def run_program(
    program: str,
    *,
    stdin: str = "",
    tests: Sequence[str] = (),
    mark: str = "",
    limits: Limits = DEFAULT,
) -> Outcome:
    """Runs a Python program's text until the program ends or reaches a limit. None of its processes
    and files remain.

    If `tests` (Python statements) are given, the output consists of the tests' reports, one per
    line. Each report starts with `mark` and is written by `confined.check`. Raises UserError if the
    sandbox is incomplete, unless `limits.partial` is True.
    """
    check_sandbox(partial=limits.partial)
    return _run(program, stdin, tests, mark, limits)


def _run(program: str, stdin: str, tests: Sequence[str], mark: str, limits: Limits) -> Outcome:
    bounds = attrs.asdict(limits) | {"processor_seconds": math.ceil(limits.processor_seconds)}
    task = {"code": program, "stdin": stdin, "tests": tests, "mark": mark}
    try:
        server = _idle.pop()
    except IndexError:
        server = _Server()
    answer = server.ask(limits.seconds + _GRACE, bounds, task)
    if answer is None:
        return Outcome(b"", -signal.SIGKILL)
    _idle.append(server)
    head, _, output = answer.partition(b"\n")
    code, used = head.split()
    return Outcome(output, int(code), float(used))


@atexit.register
def end_programs() -> None:
    """Kills all programs started by other threads of this process, so their calls return
    immediately.
    """
    _idle.clear()
    for server in list(_servers):
        server.end()


def check_sandbox(*, partial: bool = False) -> list[str]:
    """Returns the missing protections. Raises UserError if there are any, unless `partial`
    is True.
    """
    missing = _missing()
    if missing and not partial:
        raise UserError(
            "a model's programs run only in a complete sandbox, and this machine lacks "
            f"{', '.join(missing)}; on Linux, allow user namespaces (also in a container), "
            "or accept the missing protections (SECURITY.md) with answer.partial_sandbox = true"
        )
    return missing


@functools.cache
def _missing() -> list[str]:
    if sys.platform not in ("linux", "darwin"):
        return ["Linux or macOS"]
    server = _Server()
    _idle.append(server)
    runs = _run("print(1)", "", (), "", DEFAULT).output == b"1\n"
    return server.missing or ([] if runs else ["a program that runs"])


def _seatbelt(folder: str) -> str:
    def paths(places: list[str]) -> str:
        return " ".join(f'(subpath "{place}")' for place in places)

    private = ["/Users", "/Volumes", "/private/var", "/private/tmp", "/private/etc"]
    return (
        "(version 1)(allow default)(deny network*)(deny file-write*)"
        f'(allow file-write* {paths([folder])} (literal "/dev/null"))'
        f"(deny file-read* {paths(private)})"
        f"(allow file-read* {paths([folder, os.path.realpath(sys.base_prefix)])})"
        "(deny process-info*)(deny signal)(allow signal (target self))"
        "(deny mach-lookup)(deny appleevent-send)"
    )
