"""A Hub on this machine: as much of the Hugging Face Hub's HTTP interface as folders need to come and go.

The endpoints are those that huggingface_hub 2.4 asks for; what it never asks for is a 404.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.support.processes.new_process import python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_this_test"
REPO = "/api/models/([^/]+/[^/]+)"


class Hub:
    """Repositories by name, as tables of files; `requests` has "METHOD path" of each request."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.url = ""

    def add(self, name, folder):
        """Publishes the files of a folder."""
        self.repos[name] = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def python(self, *words, cwd, home=None, code=0, **more):
        """`python WORDS`, with this Hub and nothing of the user's; HF_HOME is `home`, or in `cwd`."""
        here = {"HF_ENDPOINT": self.url, "HF_HOME": str(home or cwd / "hf"), "HF_TOKEN": TOKEN}
        here |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        here |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        return python(*words, cwd=cwd, code=code, **here | more)

    def grpo(self, *words, **options):
        """`grpo WORDS`, as `python`."""
        return self.python("-m", "runners.cli", *words, **options)


@contextmanager
def serving():
    """A Hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Says nothing."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        info, tree = (
            re.fullmatch(rf"{REPO}(/revision/[^/]+)?", path),
            re.fullmatch(rf"{REPO}/tree/[^/]+", path),
        )
        match = info or tree or re.fullmatch("/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if match and match[1] not in self.hub.repos:
            self._refuse("RepoNotFound")
            return
        files = self.hub.repos[match[1]] if match else {}
        if info:
            about = {"id": match[1], "modelId": match[1], "sha": COMMIT, "private": False, "tags": []}
            self._json(about | {"siblings": [{"rfilename": file} for file in files]})
        elif tree:
            self._json(
                [{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()]
            )
        elif match and match[2] in files:
            content = files[match[2]]
            self._send(200, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT})
        else:
            self._refuse("EntryNotFound")

    def do_POST(self):
        path = urlsplit(self.path).path
        self.hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            self.hub.repos.setdefault(name, {})
            self._json({"url": f"{self.hub.url}/{name}", "id": name})
        elif re.fullmatch(rf"{REPO}/preupload/main", path):
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self._json({"files": [mode | {"path": file["path"]} for file in json.loads(body)["files"]]})
        elif match := re.fullmatch(rf"{REPO}/commit/main", path):
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.hub.repos[match[1]][entry["value"]["path"]] = content
            url = f"{self.hub.url}/{match[1]}/commit/{COMMIT}"
            self._json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        else:
            self._refuse("EntryNotFound")

    def _refuse(self, code):
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": "not here"})

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
