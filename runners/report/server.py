"""Serves a run's live page to this machine only. The server reads the run's files and writes
nothing.

Only requests whose Host is the server's own are answered, so that other web pages cannot read the
data.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote

from runners.errors import UserError, error_line, one_line
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS
from runners.machine.terminal import echo
from runners.report.page import base64_text, page
from runners.report.run_data import packed, run_data
from runners.report.run_record import find_run, is_running

HOST = "127.0.0.1"
REST = 40  # the pause after reading the files, as a multiple of the time that reading took
MOST_BYTES = 16_000_000  # limit for completions.jsonl; the page receives all data after each update
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
    server: "Server"

    def do_GET(self) -> None:
        status, kind, content = self.server.page.answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class Server(ThreadingTCPServer):
    """Serves a run's page, with one thread per connection."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 1024  # waiting connections; further clients retry after some seconds

    def __init__(self, folder: Path, port: int) -> None:
        """Listens on the port, or on a free port if that port is taken. Raises UserError if the
        folder contains no run.
        """
        self.page = LivePage(folder)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError:
            super().__init__((HOST, 0), _Handler)
        self.url = f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints a message for any failure except a closed connection."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            echo(error_line(error), err=True)


class LivePage:
    """A run's page and data. The data is read again after the run's files have changed. Several
    threads may use one instance.

    Each read is followed by a pause, so watching costs at most 2.5 % of one core.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES, rest: float = REST) -> None:
        """Raises UserError if the folder contains no run."""
        self.folder = find_run(folder)
        self._most_bytes = most_bytes
        self._rest = rest
        start = {"mode": "live", "at": "data"}
        self._page = page(self.folder.name, {}, start).encode("utf-8", "backslashreplace")
        self._guard = threading.Lock()
        self._seen = ""
        self._data = b""
        self._next = 0.0  # time.monotonic() from which the files may be read again

    def answer(self, target: str, host: str) -> Answer:
        """Returns the answer to a request for `target` with this Host: the page, or its data unless
        the page already has the data.
        """
        if host.rpartition(":")[0] not in _NAMES:
            return _text(403, f"Host: expected 127.0.0.1 or localhost, found {host[:100]}")
        path, _, seen = target.partition("?")
        try:
            if path == "/":
                return 200, "text/html; charset=utf-8", self._page
            if path != "/data":
                return _text(404, "not found")
            if seen and (unquote(seen) == self.signature() or time.monotonic() < self._next):
                return 204, "text/plain", b""
            return 200, "application/octet-stream", self.data()
        except UserError as error:
            return _text(503, one_line(str(error), {}))

    def signature(self) -> str:
        """Returns a text that changes when a file changes or the run ends."""
        found = []
        for name in (METRICS, EVENTS, COMPLETIONS, EVALUATIONS):
            with suppress(OSError):
                facts = os.stat(self.folder / name)
                found.append((name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
        return f"{found}{is_running(self.folder)}"

    def data(self) -> bytes:
        """Returns the run's compressed data, and stores its pieces in `blobs`. The data is only
        read again after a change.
        """
        with self._guard:
            seen = self.signature()
            begun = time.monotonic()
            if seen != self._seen:
                content, pieces = run_data(self.folder, self._most_bytes)
                blobs = {name: base64_text(piece) for name, piece in pieces.items()}
                self._data = packed({"seen": seen, **content, "blobs": blobs})
                self._seen = seen
                self._next = time.monotonic() + self._rest * (time.monotonic() - begun)
            return self._data


def _text(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode("utf-8", "backslashreplace")
