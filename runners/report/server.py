"""The live page of a run, for this machine alone: it reads the run's files and writes nothing.

Only requests whose Host is the server's own get an answer: a browser lets no other web page read one.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote

from runners.errors import UserError, error_line, one_line
from runners.machine.terminal import echo
from runners.report.live_run import LiveRun
from runners.report.page import page

HOST, PORT = "127.0.0.1", 8517
MOST_BYTES = 16_000_000  # of completions.jsonl in the page, which gets all of its data after each update
_NAMES = (HOST, "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}  # fmt: skip
Answer = tuple[int, str, bytes]  # status, content type, content


class _Handler(BaseHTTPRequestHandler):
    timeout = 15  # seconds that a connection may wait for its request
    server: Server

    def do_GET(self) -> None:
        status, kind, content = answer(self.server.run, self.path, self.headers.get("Host", ""))
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: requests are not worth a line."""


class Server(ThreadingTCPServer):
    """Serves a run's page, a thread for each connection."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, folder: Path, port: int) -> None:
        """Listens on the port, or on a free one if it is taken. UserError without a run."""
        self.run = LiveRun(folder, MOST_BYTES)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError:
            super().__init__((HOST, 0), _Handler)
        self.url = f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A line for a fault that is not the connection's end."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            echo(error_line(error), err=True)


def answer(run: LiveRun, target: str, host: str) -> Answer:
    """The answer to a request for `target` with this Host: the page, or its data unless it has them."""
    if host.rpartition(":")[0] not in _NAMES:
        return _text(403, f"Host: expected 127.0.0.1 or localhost, found {host[:100]}")
    path, _, seen = target.partition("?")
    try:
        if path == "/":
            text = page(run.record.folder.name, {}, {"mode": "live", "at": "data"})
            return 200, "text/html; charset=utf-8", text.encode("utf-8", "backslashreplace")
        if path != "/data":
            return _text(404, "there is nothing here")
        if seen and unquote(seen) == run.signature():
            return 204, "text/plain", b""
        return 200, "application/octet-stream", run.data()
    except UserError as error:
        return _text(503, one_line(str(error), {}))


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "backslashreplace")
