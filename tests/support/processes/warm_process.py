"""Processes of this package without the two seconds of its imports: forks of one that has imported it.

`Popen` and `run` take the place of subprocess's where a test starts `[sys.executable, "-m" or "-c", …]` and
looks at what the program does. A test of what happens at import, of a variable that a library reads at
import, or of a process's memory starts a new interpreter. For another program that starts one,

    python -P tests/support/processes/warm_process.py SOCKET -m MODULE …

is such a process: it passes its streams and signals on, and ends as it does.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def server(*variables: tuple[str, str]) -> str:
    """The socket of the server of this process's tests, which is started now and ends with this process.

    `variables` of its environment, which the libraries read as it imports them, make a server of its own.
    """
    folder = tempfile.mkdtemp(prefix="warm-", dir="/tmp")  # a socket's path has to be short
    path = f"{folder}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.warm_server", path],
        cwd=ROOT,
        env={**os.environ, **dict(variables)},
        stdin=subprocess.PIPE,
    )
    latest = time.monotonic() + 300
    while not os.path.exists(path):
        assert process.poll() is None and time.monotonic() < latest, "the server does not come up"
        time.sleep(0.01)

    def end() -> None:
        process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return path


def ask(
    path: str,
    arguments: Sequence[str],
    *,
    streams: Sequence[int],
    folder: str,
    environment: dict[str, str],
    terminal: bool = False,
    session: bool = False,
) -> tuple[int, socket.socket]:
    """A new process with these arguments of Python: its number, and the connection that reports its end."""
    request = {
        "arguments": list(arguments),
        "folder": folder,
        "environment": environment,
        "terminal": terminal,
        "session": session or terminal,
    }
    connection = socket.socket(socket.AF_UNIX)
    for _ in range(1000):  # the file is there a moment before the server listens
        try:
            connection.connect(path)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        file.seek(0)
        socket.send_fds(connection, [b"!"], [*streams, file.fileno()])
        return int(_line(connection)), connection


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        piece = connection.recv(64)
        if not piece:
            raise RuntimeError("the server of warm processes has ended")
        found += piece
    return found


class Popen(subprocess.Popen):
    """A `subprocess.Popen` of `[sys.executable, "-m" or "-c", …]` whose process is a fork of the server's.

    With `session` it leads one of its own, and with `terminal` standard input is that one's terminal.
    `imported`: variables of the environment for what the server has imported (see `server`).
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        *,
        terminal: bool = False,
        session: bool = False,
        imported: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`options`: those of subprocess's, without a preexec_fn."""
        assert arguments[0] == sys.executable and arguments[1] in ("-m", "-c"), arguments
        self._how, self._connection = {"terminal": terminal, "session": session}, None
        self._server = server(*sorted((imported or {}).items()))
        super().__init__(arguments, **options)

    def _execute_child(self, *given: Any) -> None:
        arguments, folder, environment = given[0], given[5], given[6]
        pipes = given[10:16]  # of each stream two ends
        inner = [pipes[0], pipes[3], pipes[5]]
        self.pid, self._connection = ask(
            self._server,
            [os.fspath(part) for part in arguments[1:]],
            streams=[place if number == -1 else number for place, number in enumerate(inner)],
            folder=os.fspath(folder or os.getcwd()),
            environment=dict(os.environ if environment is None else environment),
            **self._how,
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        assert self._connection is not None
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        status = int(_line(self._connection))
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._connection is not None:
            child, status = self._try_wait(os.WNOHANG)
            if child:
                self._handle_exitstatus(status)
        return self.returncode


# `subprocess.run` with this Popen in place of its own.
run = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen}, "run")
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def main() -> None:
    """Starts a process by the arguments, and ends as it ends."""
    child, connection = ask(
        sys.argv[1], sys.argv[2:], streams=(0, 1, 2), folder=os.getcwd(), environment=dict(os.environ)
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitstatus_to_exitcode(int(_line(connection)))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
