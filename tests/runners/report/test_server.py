"""The live page's server: its answers, and the requests that it refuses."""

import json
import selectors
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from runners.files.json_files import JsonLines
from runners.report.server import LivePage, Server
from tests.support.commands import grpo
from tests.support.processes.new_process import ROOT
from tests.support.runs.report_runs import make_run, write_update

HOST = "127.0.0.1:8517"


def unpacked(answer):
    """The JSON of an answer."""
    status, _, body = answer
    assert status == 200
    return json.loads(zlib.decompress(body))


@pytest.fixture
def ask(tmp_path):
    """Requests a path from the page of a run."""
    page = LivePage(make_run(tmp_path / "run"))
    return lambda path, host=HOST: page.answer(path, host)


def test_a_run_is_a_page_and_its_data(ask):
    """The data contain all pieces; without changes, the answer is empty."""
    assert ask("/")[0] == 200
    first = unpacked(ask("/data"))
    assert ask(f"/data?{quote(first['seen'])}") == (204, "text/plain", b"")
    (part,) = first["completions"]["parts"]
    assert part["rows"] == 48
    assert {part["numbers"], part["texts"], first["evaluations"][0]["at"]} <= {*first["blobs"]}


@pytest.mark.parametrize("path", ["/run/", "/data/", "/..", "/%2e%2e/", "/config.resolved.json", ""])
def test_what_is_not_there_is_not_found(ask, path):
    """No path leads to a file."""
    assert ask(path)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8517", "127.0.0.1.evil.example:8517", "", "[::"]
)
def test_other_hosts_are_refused(ask, host):
    """The name of another web page could resolve to this address."""
    for path in ("/", "/data"):
        assert ask(path, host)[0] == 403


def test_a_restarted_run_is_read_again(tmp_path):
    """Changed pieces have new names, because a browser caches pieces by name."""
    page = LivePage(make_run(tmp_path / "run"), rest=0)
    before = unpacked(page.answer("/data", HOST))
    page.folder.rename(tmp_path / "before")
    make_run(page.folder, texts=("other", "texts"))
    after = unpacked(page.answer(f"/data?{quote(before['seen'])}", HOST))
    assert after["metrics"]["lines"] == before["metrics"]["lines"]
    assert after["completions"]["parts"][0]["texts"] not in before["blobs"]


def test_a_page_that_has_data_waits_after_a_long_reading(tmp_path):
    """A new page receives the data at once."""
    page = LivePage(make_run(tmp_path / "run"), rest=1e6)
    seen = unpacked(page.answer("/data", HOST))["seen"]
    (page.folder / "training_log.jsonl").touch()
    assert page.signature() != seen and page.answer(f"/data?{quote(seen)}", HOST)[0] == 204
    assert unpacked(page.answer("/data", HOST))["seen"] == page.signature()


def test_clients_get_the_data_while_lines_are_written(tmp_path):
    """Over HTTP, each answer has complete lines and columns of equal length."""
    folder = make_run(tmp_path / "run", end=None)
    with Server(folder, 0) as server, ThreadPoolExecutor(4) as clients:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(_):
            with urlopen(f"{server.url}data", timeout=600) as found:
                metrics = json.loads(zlib.decompress(found.read()))["metrics"]
            return metrics["lines"] == len(metrics["columns"]["update"])

        with closing(JsonLines(folder / "training_log.jsonl", keep=1 << 40)) as log:
            asked = clients.map(ask, range(20))
            for update in range(7, 107):
                write_update({"training_log": log, "completions": log, "evaluations": log}, update)
        assert all(asked)
        server.shutdown()


def ask_at_once(port, path, number):
    """The sizes of the answers to simultaneous requests; 0 if there is none within 20 s."""
    until = time.monotonic() + 20
    waiting = [socket.socket() for _ in range(number)]
    for client in waiting:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
    with selectors.DefaultSelector() as ready:
        for client in waiting:
            ready.register(client, selectors.EVENT_WRITE)
        sizes = dict.fromkeys(waiting, 0)
        while ready.get_map() and time.monotonic() < until:
            for key, _ in ready.select(1):
                client = key.fileobj
                if key.events == selectors.EVENT_WRITE:
                    client.send(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                    ready.modify(client, selectors.EVENT_READ)
                elif content := client.recv(1 << 16):
                    sizes[client] += len(content)
                else:
                    ready.unregister(client)
    for client in waiting:
        client.close()
    return list(sizes.values())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_two_hundred_clients_at_once(tmp_path):
    """All are answered within seconds, repeatedly and without growing memory."""
    folder = make_run(tmp_path / "run")
    command, used = [sys.executable, "-m", "runners.cli", "watch", str(folder), "--port", "0"], []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
            for path in ("/", "/data") * 3:
                began = time.monotonic()
                sizes = ask_at_once(port, path, 200)
                assert len(sizes) == 200 and min(sizes) == max(sizes) > 1000
                assert time.monotonic() - began < 5
                status = Path(f"/proc/{server.pid}/status").read_text()
                used.append(int(status.partition("VmRSS:")[2].split()[0]))
        finally:
            server.terminate()
    assert used[-1] < used[1] + 20_000, used  # kB


def test_of_completions_that_grow_large_fewer_updates_are_shown(tmp_path):
    """An answer contains all shown completions, so its size must be bounded."""
    folder = make_run(tmp_path / "run", updates=3)
    path = folder / "completions.jsonl"
    page = LivePage(folder, 2 * path.stat().st_size)

    def shown():
        found = unpacked(page.answer("/data", HOST))["completions"]
        return found["rows"], found["left_out"]

    assert shown() == (24, 0)
    with closing(JsonLines(path, keep=1 << 40)) as grown, closing(JsonLines(tmp_path / "rest")) as rest:
        for update in range(4, 13):
            write_update({"completions": grown, "training_log": rest, "evaluations": rest}, update)
    assert shown() == (8 * 6, 6)  # of updates 1, 3, 5, 7, 9, 11


def test_a_taken_port_is_replaced_by_a_free_one(tmp_path):
    folder = make_run(tmp_path / "run")
    with Server(folder, 0) as first, Server(folder, first.server_address[1]) as second:
        assert second.server_address[1] != first.server_address[1]


def test_the_command_refuses_a_folder_without_a_run(tmp_path):
    """It fails before it listens, and names the runs in the folder."""
    make_run(tmp_path / "one")
    done = grpo("watch", tmp_path, code=2)
    assert "it contains the runs one" in done.output
