"""A server with an API like OpenAI's, with answers of the test's own."""

import json
import socket
import threading
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.processes.waiting import HANGS


class Requests(list):
    """(headers, body) of each POST; `together` is how many there were at a time at most."""

    def __init__(self):
        """None yet."""
        self.together = self._now = 0
        self.lock = threading.Lock()

    def __enter__(self):
        with self.lock:
            self._now += 1
            self.together = max(self.together, self._now)

    def __exit__(self, *_):
        with self.lock:
            self._now -= 1


def completion(text, **more):
    """The API's answer with this text."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage} | more


@contextmanager
def answering(answer, models=200):
    """(url, requests) of a server; `models` is the status of GET.

    `answer(body, number)` gives a text, an object, (status, object or text), or (status, object, headers).
    """
    requests = Requests()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.reply(models, {"data": []}, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with requests:
                with requests.lock:
                    requests.append((dict(self.headers), body))
                    number = len(requests)
                found = answer(body, number)
                status, content, *headers = found if isinstance(found, tuple) else (200, found)
                if status == 200 and isinstance(content, str):
                    content = completion(content)
                self.reply(status, content, headers[0] if headers else {})

        def reply(self, status, content, headers):
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has gone, as it does at its time limit

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(url):
    """Whether a server is there."""
    try:
        urllib.request.urlopen(url, timeout=HANGS).close()
    except OSError:
        return False
    return True
