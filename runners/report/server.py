"""The live page of a run, for this machine alone: it reads the run's files and writes nothing.

Only requests whose Host and Origin are the server's own get an answer, so that no other web page can read a
run through the browser.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from runners.errors import UserError, error_line, one_line
from runners.machine.terminal import echo
from runners.report.live_run import LiveRun
from runners.report.page import page

HOST, PORT = "127.0.0.1", 8517
MOST_BYTES = 16_000_000  # of completions.jsonl in the page, which gets all of its data after each update
_NAMES = (HOST, "localhost")
_TRIED = 20  # ports, from the wanted one on
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}  # fmt: skip
Answer = tuple[int, str, bytes]  # status, content type, content


class _Handler(BaseHTTPRequestHandler):
    timeout = 15  # seconds that a connection may wait for its request
    server: Server

    def do_GET(self) -> None:
        headers = self.headers.get("Host", ""), self.headers.get("Origin")
        status, kind, content = answer(self.server.run, self.path, *headers)
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
        """Listens on the port, or the next free one; 0: on any. UserError without a run or a free port."""
        self.run = LiveRun(folder, MOST_BYTES)
        last = min(port + _TRIED, 65535) if port else 0
        for number in range(port, last + 1):
            try:
                super().__init__((HOST, number), _Handler)
                break
            except OSError as error:
                if number == last:
                    raise UserError(
                        f"{HOST}, port {port}: cannot be listened on: {error.strerror}"
                    ) from error
        self.url = f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A line for a fault that is not the connection's end."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            echo(error_line(error), err=True)


def answer(run: LiveRun, target: str, host: str, origin: str | None = None) -> Answer:
    """The answer to a request for `target` with these headers: the page, or its data unless it has them."""
    if _address(f"//{host}")[0] not in _NAMES:
        return _text(403, f"Host: expected 127.0.0.1 or localhost, found {host[:100]}")
    if origin is not None and _address(origin)[1] != host.lower():
        return _text(403, "requests of other pages are refused")
    path, _, seen = target.partition("?")
    try:
        if path == "/":
            text = page(run.record.folder.name, [], {"mode": "live", "at": "data"})
            return 200, "text/html; charset=utf-8", text.encode("utf-8", "backslashreplace")
        if path != "/data":
            return _text(404, "there is nothing here")
        if seen and unquote(seen) == run.signature():
            return 204, "text/plain", b""
        return 200, "application/octet-stream", run.data()
    except UserError as error:
        return _text(503, one_line(str(error), {}))


def _address(url: str) -> tuple[str, str]:
    """A URL's host name, and it with its port; both empty if it is none."""
    try:
        found = urlsplit(url)
        return (found.hostname or "").lower(), found.netloc.lower()
    except ValueError:
        return "", ""


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "backslashreplace")
