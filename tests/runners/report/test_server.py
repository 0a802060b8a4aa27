"""The live page's server: what it serves, and whom it refuses."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import zlib
from contextlib import ExitStack, suppress
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from runners.cli import main
from runners.errors import UserError
from runners.report.application import application
from runners.report.live_run import LiveRun
from runners.report.server import listening
from tests.support.runs.report_runs import make_run


def get(app, path, method="GET", **headers):
    """Status, headers and body of a request to an ASGI application."""
    return asyncio.run(got(app, path, method, **headers))


async def got(app, path, method="GET", **headers):
    """The same in a loop that runs."""
    sent = []
    path, _, query = path.partition("?")
    named = {"host": "127.0.0.1:8517"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": query.encode(), "scheme": "http", "http_version": "1.1",
        "server": ("127.0.0.1", 8517),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


def unpacked(answer):
    """The JSON of an answer."""
    status, _, body = answer
    assert status == 200
    return json.loads(zlib.decompress(body))


@pytest.fixture
def app(tmp_path):
    """Serves two runs of a folder."""
    make_run(tmp_path / "one")
    make_run(tmp_path / "two & <three>")
    (tmp_path / "other").mkdir()
    return application(tmp_path, ("127.0.0.1", "localhost"))


def test_a_folder_is_a_list_of_its_runs(app):
    """By escaped names; what is no run is not there."""
    status, headers, body = get(app, "/")
    assert status == 200 and b"two &amp; &lt;three&gt;" in body and b">other<" not in body
    assert headers[b"x-frame-options"] == b"DENY"


def test_a_run_is_a_page_and_its_data(app):
    """The page; all lines; those from one on; the pieces that the data names."""
    assert get(app, "/run/one/")[0] == 200
    first = unpacked(get(app, "/run/one/first"))
    lines, generation = first["metrics"]["lines"], first["generation"]
    later = unpacked(get(app, f"/run/one/data?generation={generation}&since={lines - 1}"))
    assert [len(values) for values in later["metrics"]["columns"].values()].count(1)
    assert unpacked(get(app, f"/run/one/data?generation={generation + 1}&since=5"))["metrics"]["since"] == 0
    (part,) = first["completions"]["parts"]
    assert len(unpacked(get(app, f"/run/one/{part['numbers']}"))["reward"]) == part["rows"] == 48
    assert unpacked(get(app, f"/run/one/{first['evaluations'][0]['at']}"))["problems"]


@pytest.mark.parametrize(
    "path",
    ["/run/none/", "/run/../one/", "/run/other/first", "/run/one/part/0-9-1-0/texts", "/run/one/part/x/texts",
     "/run/one/part/0-0-1-0/secrets", "/run/one/evaluation/0-99-1", "/config.resolved.json"],
)  # fmt: skip
def test_what_is_not_there_is_not_found(app, path):
    """No path leads out of the folder."""
    get(app, "/run/one/first")
    assert get(app, path)[0] == 404


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"host": "127.0.0.1.evil.example:8517"}, {"host": ""}, {"host": "[::"},
     {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"origin": "http://["}],
)  # fmt: skip
def test_other_hosts_and_pages_are_refused(app, headers):
    """Whatever they ask for."""
    for path in ("/", "/run/one/first"):
        assert get(app, path, **headers)[0] == 403
    assert get(app, "/", origin="http://127.0.0.1:8517")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_only_be_read(app, method):
    """No method changes anything."""
    assert get(app, "/run/one/first", method)[0] == 405


def test_a_restarted_run_is_read_again(tmp_path):
    """The generation tells the page to forget what it had."""
    folder = make_run(tmp_path / "run")
    live = LiveRun(folder)
    before = json.loads(zlib.decompress(live.data(-1, 0)))
    seen = live.signature()
    for name in ("training_log", "completions"):
        (folder / f"{name}.jsonl").rename(folder / f"{name}.previous.jsonl")
    make_run(tmp_path / "again", updates=2)
    for name in ("training_log", "completions"):
        (tmp_path / "again" / f"{name}.jsonl").rename(folder / f"{name}.jsonl")
    assert live.signature() != seen
    after = json.loads(zlib.decompress(live.data(before["generation"], before["metrics"]["lines"])))
    assert after["generation"] != before["generation"] and after["metrics"]["since"] == 0
    assert (before["completions"]["rows"], after["completions"]["rows"]) == (48, 16)


def test_a_taken_port_is_followed_by_the_next():
    """And where all are taken, a line says so."""
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listening("127.0.0.1", port) as second:
            assert second.getsockname()[1] > port
    with pytest.raises(UserError, match="cannot be listened on"):
        listening("192.0.2.1", 8517)
    assert isinstance(first, socket.socket)


def test_running_out_of_descriptors_is_reported_once(tmp_path):
    """100 connections at a limit of 64: a few lines, and it answers again when they have gone."""
    make_run(tmp_path / "run")
    limited = f'ulimit -n 64; exec "{sys.executable}" -m runners.cli watch --port 0 "{tmp_path}"'
    with open(tmp_path / "said", "w+") as said:
        process = subprocess.Popen(["sh", "-c", limited], stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            port = urlsplit(process.stdout.readline().split()[0]).port
            with ExitStack() as stack:
                for _ in range(100):
                    with suppress(TimeoutError):  # the queue is full
                        stack.enter_context(socket.create_connection(("127.0.0.1", port), 0.1))
                time.sleep(2)
            answer, end = b"", time.monotonic() + 600
            while b">run<" not in answer and time.monotonic() < end:
                with suppress(HTTPError), urlopen(f"http://127.0.0.1:{port}/", timeout=60) as found:
                    answer = found.read()
            assert b">run<" in answer
        finally:
            process.terminate()
            process.wait()
        said.seek(0)
        assert len(said.read().splitlines()) < 10


def test_the_command_refuses_a_folder_without_runs(tmp_path):
    """Before it listens."""
    done = CliRunner().invoke(main, ["watch", str(tmp_path)])
    assert done.exit_code == 2 and "this is no run's folder" in done.output
