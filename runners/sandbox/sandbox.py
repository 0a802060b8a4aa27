"""Runs a Python program that nobody has read, shut off from network, files, processes and secrets.

Linux: namespaces through util-linux. macOS: `sandbox-exec`. The program sees this Python's standard library,
read-only, and an empty folder. Where this does not work nothing is run.
"""

from __future__ import annotations

import functools
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import attrs

from runners.errors import UserError

SCRATCH = "/scratch"  # the program's own folder on Linux
_HERE = Path(__file__).parent
_PROBE = Path(__file__).name  # any text that a probe prints


@attrs.frozen
class Limits:
    """What a program may use."""

    seconds: float = 10.0  # from its start to its end, waiting included
    memory: int = 512_000_000  # bytes of address space of each of its processes
    processes: int = 8  # at a time, threads included
    disk: int = 64_000_000  # bytes in its folder; on macOS of each file
    output: int = 1_000_000  # bytes; what is printed beyond ends the program


DEFAULT = Limits()
_running: set[subprocess.Popen[bytes]] = set()  # the programs of all threads


@attrs.frozen
class Outcome:
    """How a program ended, and what it printed."""

    output: bytes  # stdout and stderr as they came, up to the limit
    code: int  # exit code; not 0 where a limit ended it


def run_program(program: str, *, stdin: bytes = b"", limits: Limits = DEFAULT) -> Outcome:
    """Runs a Python program's text to its end or to a limit; nothing of it is left afterwards.

    Raises UserError where this system offers no sandbox.
    """
    # Inside, a Python sets limits that the program cannot lift, then runs its text.
    numbers = [limits.memory, limits.processes, limits.disk, int(limits.seconds) + 1]
    inside = [_interpreter(), "-I", "-S", "-B", "-c", _INSIDE, *map(str, numbers), program]
    with _command(limits) as (command, folder):
        places = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
        process = subprocess.Popen(
            [*command, *inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**places, "LC_ALL": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        _running.add(process)
        timer = threading.Timer(limits.seconds, _end, [process])
        timer.start()
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True).start()
        try:
            output = process.stdout.read(limits.output + 1)
            if len(output) > limits.output:
                return Outcome(output[: limits.output], -signal.SIGKILL)
            return Outcome(output, process.wait())
        finally:
            timer.cancel()
            _running.discard(process)
            _end(process)
            process.stdout.close()
            process.wait()


def end_programs() -> None:
    """Ends all programs that other threads of this process run; they return at once."""
    for process in list(_running):
        _end(process)


def _feed(stream: IO[bytes], content: bytes) -> None:
    with suppress(OSError), stream:  # the program may end without reading it all
        stream.write(content)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a program: its process namespace, or on macOS its session, ends with the first process."""
    with suppress(OSError):  # the namespace's first process may have left the group
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_INSIDE = """
import os, resource, sys
memory, processes, disk, seconds = map(int, sys.argv[1:5])
limits = {"CORE": 0, "FSIZE": disk, "NOFILE": 64, "CPU": seconds, "NPROC": processes, "AS": memory}
for name, most in limits.items():
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    except (ValueError, OSError):
        if sys.platform != "darwin":
            raise
os.chdir(os.environ["TMPDIR"])
program = sys.argv[5]
del sys.argv[1:], memory, processes, disk, seconds, limits, name, most
exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""


@contextmanager
def _command(limits: Limits) -> Iterator[tuple[list[str], str]]:
    """The command that shuts off what follows it, and the program's folder as it will see it."""
    if mechanism() == "namespaces":
        yield _namespaces(limits), SCRATCH
        return
    with tempfile.TemporaryDirectory(prefix="grpo-sandbox-") as folder:
        folder = os.path.realpath(folder)
        yield ["sandbox-exec", "-p", _seatbelt(folder)], folder


@functools.cache
def mechanism() -> str:
    """What shuts programs off here: "namespaces" or "sandbox-exec". UserError where it does not work."""
    kind, command = "namespaces", _namespaces(DEFAULT)
    if sys.platform == "darwin":
        kind, command = "sandbox-exec", ["sandbox-exec", "-p", "(version 1)(allow default)"]
    probe = [*command, _interpreter(), "-I", "-S", "-c", f"print({_PROBE!r})"]
    try:
        found = subprocess.run(probe, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd="/")
    except OSError as error:
        reason = str(error)
    else:
        if found.stdout.strip() == _PROBE:
            return kind
        reason = (found.stderr.strip().splitlines() or ["no output"])[-1]
    raise UserError(
        f"a model's programs run only in a sandbox, and {kind} do not work here ({reason}); on Linux allow "
        "user namespaces, also in a container"
    )


def _interpreter() -> str:
    """This Python's real file: a virtual environment's is a link to it."""
    return os.path.realpath(sys.executable)


def _readable() -> list[str]:
    """The folders and files that a Python needs to start."""
    places = {"/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sysconfig.get_path("stdlib")}
    places |= {os.path.realpath(sys.base_prefix), os.path.dirname(_interpreter())}
    below = sorted(place for place in places if os.path.exists(place))
    return [place for place in below if not any(place.startswith(other + "/") for other in below)]


def _namespaces(limits: Limits) -> list[str]:
    # Root has no bound on its processes: it becomes a user that nobody else is.
    user = str(1_000_000_000 + secrets.randbelow(1_000_000_000)) if os.geteuid() == 0 else ""
    share = ["--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]
    share += [] if user else ["--user", "--map-root-user"]
    script = (_HERE / "namespaces.sh").read_text()
    return ["unshare", *share, "sh", "-c", script, "sh", user, str(limits.disk), *_readable(), "--"]


def _seatbelt(folder: str) -> str:
    def paths(places: list[str]) -> str:
        return " ".join(f'(subpath "{place}")' for place in places)

    return (
        "(version 1)(allow default)(deny network*)(deny file-write*)"
        f'(allow file-write* {paths([folder])} (literal "/dev/null"))'
        f"(deny file-read* {paths(['/Users', '/Volumes', '/private/var', '/private/tmp', '/private/etc'])})"
        f"(allow file-read* {paths([folder, os.path.realpath(sys.base_prefix)])})"
        "(deny process-info*)(deny signal)(allow signal (target self))"
        "(deny mach-lookup)(deny appleevent-send)"
    )
