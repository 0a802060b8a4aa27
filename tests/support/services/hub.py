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

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by name, each a table of file names and bytes; `requests` keeps "METHOD path" of each."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.url = ""

    def add(self, name, folder):
        """Publishes the files of a folder."""
        self.repos[name] = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def environment(self, home):
        """What a process needs in its environment to find this Hub, and nothing of the user's."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "hf_of_this_test",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


@contextmanager
def serving():
    """A Hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
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

    def do_GET(self):
        self._read("GET")

    def do_HEAD(self):
        self._read("HEAD")

    def _read(self, method):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            return self._of_repo(match[1], lambda files: self._json(self._info(match[1], files)))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            return self._of_repo(match[1], lambda files: self._json([_entry(*f) for f in files.items()]))
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._of_repo(match[1], lambda files: self._file(files.get(match[2])))
        return self._refuse("EntryNotFound")

    def _of_repo(self, name, answer):
        if name not in self.hub.repos:
            return self._refuse("RepoNotFound")
        return answer(self.hub.repos[name])

    def _info(self, name, files):
        siblings = [{"rfilename": file} for file in files]
        return {
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }

    def _file(self, content):
        if content is None:
            return self._refuse("EntryNotFound")
        return self._send(200, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT})

    def do_POST(self):
        path = urlsplit(self.path).path
        self.hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            self.hub.repos.setdefault(name, {})
            return self._json({"url": f"{self.hub.url}/{name}", "id": name})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": modes})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.hub.repos[match[1]][entry["value"]["path"]] = content
            url = f"{self.hub.url}/{match[1]}/commit/{COMMIT}"
            return self._json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        return self._refuse("EntryNotFound")

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


def _entry(name, content):
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
