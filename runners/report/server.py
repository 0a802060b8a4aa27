"""The live page's server: its socket, its process, and its end. It writes nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from runners.errors import UserError, error_line
from runners.machine.terminal import echo
from runners.report.site import LOCAL, Site

HOST, PORT = "127.0.0.1", 8517
_TRIED = 20  # ports, from the wanted one on
_IDLE = 15  # seconds that a connection may wait for its request
_LINGER = 2.5  # seconds in which an open page sees how its run ended
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE
    server: Server

    def do_GET(self) -> None:
        self.server.asked_at = time.monotonic()
        status, kind, content = self.server.site.answer(
            self.path, self.headers.get("Host", ""), self.headers.get("Origin")
        )
        self.send_response(status)
        if kind:
            self.send_header("Location" if status == 303 else "Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are not worth a line."""


class Server(ThreadingHTTPServer):
    """Serves a site on a socket that is already open, a thread for each connection."""

    daemon_threads = True

    def __init__(self, found: socket.socket, site: Site) -> None:
        """Takes over the socket."""
        super().__init__(found.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.site, self.asked_at = found, site, float("-inf")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A line for a fault that is not the connection's end."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            echo(error_line(error), err=True)


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
    """Serves the run in `place`, or the runs in it, on the socket of `listening` until Ctrl-C.

    It answers to the names of this machine's loopback and to `hosts`. `with_parent`: it also ends when
    standard input ends, and so with the process that started this one.
    """
    server = Server(found, Site(place, (*LOCAL, found.getsockname()[0], *hosts)))
    if with_parent:
        threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:  # how a person ends it
        return


def _end_with_parent(server: Server) -> None:
    while sys.stdin.buffer.read(1 << 12):
        pass
    if time.monotonic() - server.asked_at < _LINGER:  # a page is open
        time.sleep(_LINGER)
    server.shutdown()


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    """Serves the run in `folder`, which need not exist yet, within the block; the block gets the URL.

    Raises UserError if no port is free. Later faults of the server do not affect the run.
    """
    with listening(HOST, PORT) as found:
        number = found.fileno()
        command = [sys.executable, "-m", "runners.report.server", str(folder), str(number)]
        # A session of its own, because Ctrl-C is for the run. It ends with its stdin, so with the run.
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
            server.wait(2 * _LINGER)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":  # FOLDER DESCRIPTOR: the live page beside a run, on an open socket
    os.nice(10)  # the run has priority
    serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), with_parent=True)
