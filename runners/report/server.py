"""The live page's server: its socket, its process, and its end."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runners.errors import UserError, error_line
from runners.machine.terminal import echo
from runners.report.application import application

HOST, PORT = "127.0.0.1", 8517
_TRIED = 20  # ports, from the wanted one on
_LOCAL = ("127.0.0.1", "localhost", "::1")


def check_server_installed() -> None:
    """Raises UserError if a package is missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"the live page needs {' and '.join(missing)}: `pip install starlette uvicorn`")


def listening(host: str, port: int) -> socket.socket:
    """A socket on the port, or on the next free one; 0: on any. UserError if none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    fault: OSError | None = None
    for number in [port] if port == 0 else range(port, min(port + _TRIED, 65536)):
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, number))
            found.listen(64)
            return found
        except OSError as error:
            found.close()
            fault = error
    raise UserError(f"{host}, port {port}: cannot be listened on: {fault and (fault.strerror or fault)}")


def address(found: socket.socket) -> str:
    """The URL of a socket."""
    host, port = found.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(place: Path, found: socket.socket, hosts: Sequence[str] = (), *, with_parent: bool = False) -> None:
    """Serves the run in `place`, or the runs in it, until Ctrl-C.

    Args:
        place: a run's folder, or one that holds runs' folders.
        found: the socket from `listening`.
        hosts: host names that the server answers to, besides those of this machine's loopback.
        with_parent: also ends when standard input ends, and so with the process that started this one.
    """
    import uvicorn

    host = found.getsockname()[0]
    ends: list[Callable[[], bool]] = []
    settings = uvicorn.Config(
        application(place, (*_LOCAL, host, *hosts), lambda: any(end() for end in ends)),
        log_config=None,
        access_log=False,
        backlog=64,
        timeout_graceful_shutdown=3,
        lifespan="off",
    )
    lines = _Lines(logging.WARNING)
    for name in ("uvicorn", "asyncio"):
        logging.getLogger(name).addHandler(lines)
    server = uvicorn.Server(settings)
    ends.append(lambda: server.should_exit)
    if with_parent:
        threading.Thread(target=_until_alone, args=(server,), daemon=True).start()
    try:
        server.run(sockets=[found])
    except KeyboardInterrupt:  # how a person ends it
        return


class _Lines(logging.Handler):
    """Shows each warning of the server once, in a line, however often it is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage().strip().partition("\n")[0] + (f": {error_line(error)}" if error else "")
        if text not in self.shown:
            self.shown.add(text)
            echo(text, err=True)


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    """Serves the run in `folder`, which need not exist yet, within the block; the block gets the URL.

    Raises UserError if a package is missing or no port is free. Later faults of the server do not affect the
    run.
    """
    check_server_installed()
    with listening(HOST, PORT) as found:
        number = found.fileno()
        command = [sys.executable, "-m", "runners.report.server", str(folder), str(number)]
        # A separate session, because Ctrl-C is for the run. It ends when its standard input ends, with the
        # run.
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
        )
        url = address(found)
    assert server.stdin is not None
    try:
        yield url
    finally:
        server.stdin.close()
        try:
            server.wait(3)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _until_alone(server: Any) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    server.should_exit = True


if __name__ == "__main__":  # FOLDER DESCRIPTOR: the live page beside a run, on an open socket
    os.nice(10)  # the run has priority
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), with_parent=True)
