"""The live page's server: what it serves, and whom it refuses."""

import http.client
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from runners.cli import main
from runners.errors import UserError
from runners.files.json_lines import JsonLines
from runners.report.live_run import LiveRun
from runners.report.server import Server, address, listening
from runners.report.site import Site
from tests.support.runs.report_runs import make_run, write_update

HOST = "127.0.0.1:8517"


def unpacked(answer):
    """The JSON of an answer."""
    status, _, body = answer
    assert status == 200
    return json.loads(zlib.decompress(body))


@pytest.fixture
def ask(tmp_path):
    """Asks the site of a folder with two runs."""
    make_run(tmp_path / "one")
    make_run(tmp_path / "two & <three>")
    (tmp_path / "other").mkdir()
    site = Site(tmp_path, ("127.0.0.1", "localhost"))
    return lambda path, host=HOST, origin=None: site.answer(path, host, origin)


@contextmanager
def served(place: Path):
    """A server's connection and address."""
    found = listening("127.0.0.1", 0)
    server = Server(found, Site(place))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address(found)
    finally:
        server.shutdown()
        server.server_close()


def test_a_folder_is_a_list_of_its_runs(ask):
    """By escaped names; what is no run is not there."""
    status, _, body = ask("/")
    assert status == 200 and b"two &amp; &lt;three&gt;" in body and b">other<" not in body


def test_a_run_is_a_page_and_its_data(ask):
    """The page; all lines; those from one on; nothing if nothing is new; the pieces that the data names."""
    assert ask("/run/one/")[0] == ask("/run/two%20%26%20%3Cthree%3E/")[0] == 200
    first = unpacked(ask("/run/one/data"))
    lines, generation = first["metrics"]["lines"], first["generation"]
    later = unpacked(ask(f"/run/one/data?generation={generation}&since={lines - 1}"))
    assert [len(values) for values in later["metrics"]["columns"].values()].count(1)
    assert unpacked(ask(f"/run/one/data?generation={generation + 1}&since=5"))["metrics"]["since"] == 0
    assert ask(f"/run/one/data?seen={first['seen']}") == (204, "", b"")
    (part,) = first["completions"]["parts"]
    assert len(unpacked(ask(f"/run/one/{part['numbers']}"))["reward"]) == part["rows"] == 48
    assert unpacked(ask(f"/run/one/{first['evaluations'][0]['at']}"))["problems"]


def test_one_run_is_shown_at_once(tmp_path):
    """Without a list."""
    assert Site(make_run(tmp_path / "one")).answer("/", HOST)[:2] == (303, "run/one/")


@pytest.mark.parametrize(
    "path",
    ["/run/none/", "/run/../one/", "/run/%2e%2e/", "/run/other/data", "/run/one/part/0-9-1/texts",
     "/run/one/part/x/texts", "/run/one/part/0-0-1/secrets", "/run/one/part/0-0-1",
     "/run/one/evaluation/0-99-1", "/config.resolved.json", ""],
)  # fmt: skip
def test_what_is_not_there_is_not_found(ask, path):
    """No path leads out of the folder."""
    ask("/run/one/data")
    assert ask(path)[0] == 404


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"host": "127.0.0.1.evil.example:8517"}, {"host": ""}, {"host": "[::"},
     {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"origin": "http://["}],
)  # fmt: skip
def test_other_hosts_and_pages_are_refused(ask, headers):
    """Whatever they ask for."""
    for path in ("/", "/run/one/data"):
        assert ask(path, **headers)[0] == 403
    assert ask("/", origin=f"http://{HOST}")[0] == 200


def test_it_can_only_be_read_and_not_be_framed(tmp_path):
    """No method changes anything; the headers keep other pages away."""
    make_run(tmp_path / "run")
    with served(tmp_path) as url:
        line = http.client.HTTPConnection(urlsplit(url).netloc)
        for method in ("POST", "PUT", "DELETE"):
            line.request(method, "/run/run/data")
            assert line.getresponse().status == 501
        line.request("GET", "/")
        found = line.getresponse()
        assert found.status == 200 and found.getheader("x-frame-options") == "DENY"


def test_a_restarted_run_is_read_again(tmp_path):
    """The generation tells the page to forget what it had."""
    folder = make_run(tmp_path / "run")
    live = LiveRun(folder)
    before = json.loads(zlib.decompress(live.data(-1, 0)))
    for name in ("training_log", "completions"):
        (folder / f"{name}.jsonl").rename(folder / f"{name}.previous.jsonl")
    make_run(tmp_path / "again", updates=2)
    for name in ("training_log", "completions"):
        (tmp_path / "again" / f"{name}.jsonl").rename(folder / f"{name}.jsonl")
    assert live.signature() != before["seen"]
    after = json.loads(zlib.decompress(live.data(before["generation"], before["metrics"]["lines"])))
    assert after["generation"] != before["generation"] and after["metrics"]["since"] == 0
    assert (before["completions"]["rows"], after["completions"]["rows"]) == (48, 16)


def test_fifty_clients_count_each_line_once(tmp_path):
    """They load pages and data while lines are appended: in the end each of them has the file's count."""
    folder = make_run(tmp_path / "run", end=None)
    ended = threading.Event()

    def client(url):
        lines, generation = 0, -1
        while True:
            last = ended.is_set()
            with urlopen(f"{url}run/run/data?generation={generation}&since={lines}", timeout=600) as answer:
                found = json.loads(zlib.decompress(answer.read()))
            assert (
                len(found["metrics"]["columns"]["update"])
                == found["metrics"]["lines"] - found["metrics"]["since"]
            )
            lines, generation = found["metrics"]["lines"], found["generation"]
            if last:
                return lines

    with served(tmp_path) as url, ThreadPoolExecutor(50) as clients:
        counts = [clients.submit(client, url) for _ in range(50)]
        with closing(JsonLines(folder / "training_log.jsonl", keep=1 << 40)) as log:
            for update in range(7, 107):
                write_update({"training_log": log, "completions": log, "evaluations": log}, update)
        ended.set()
        wanted = (folder / "training_log.jsonl").read_bytes().count(b"\n")
        assert {count.result() for count in counts} == {wanted}


def test_a_taken_port_is_followed_by_the_next():
    """And where all are taken, a line says so."""
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listening("127.0.0.1", port) as second:
            assert second.getsockname()[1] > port
    with pytest.raises(UserError, match="cannot be listened on"):
        listening("192.0.2.1", 8517)


def test_the_command_refuses_a_folder_without_runs(tmp_path):
    """Before it listens."""
    done = CliRunner().invoke(main, ["watch", str(tmp_path)])
    assert done.exit_code == 2 and "this is no run's folder" in done.output
