"""Foreign runs: odd values, links, fifos. None breaks its own page, or that of another run."""

import base64
import json
import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path

import pytest

from runners.errors import UserError
from runners.report import write_report
from runners.report.site import Site
from tests.runners.report.test_server import HOST, unpacked
from tests.support.runs.report_runs import make_run

LOGS = ("training_log", "events", "completions", "evaluations")
ODD = '{"update": NaN, "event": "note", "reward": -Infinity, "time": 1e999, "n": NaN, "rows": [[NaN]]}'
MORE = '{"metrics": {"a": NaN}, "extra": {"b": 1e999}, "messages": [NaN], "rewards": {"c": NaN}}'
NAMES = '{"update": 1, "__proto__": 1, "constructor": 2, "\\ud800": 3, "": 4}'
DEEP = '{"a":' * 900 + "1" + "}" * 900


def with_lines(*lines):
    """Lines more in each log."""

    def change(folder):
        for name in LOGS:
            with open(folder / f"{name}.jsonl", "a") as stream:
                stream.write("".join(f"{line}\n" for line in lines))

    return change


def with_config(text):
    """A config of this text."""
    return lambda folder: (folder / "config.resolved.json").write_text(text)


def with_fifo(name):
    """A fifo under this name: to open it waits."""

    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def with_folder(name):
    """A folder under this name."""

    def change(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def with_link(name):
    """A link to a file that is none of the run's."""

    def change(folder):
        secret = folder.parent / "secret.json"
        line = '{"event": "note", "update": 1, "text": "secret-1", "completion": "secret-2", "secret-3": 3}\n'
        secret.write_text(line * (1 if name.startswith("config") else 1000))
        (folder / name).unlink()
        (folder / name).symlink_to(secret)

    return change


FOREIGN = {
    "nan": with_lines(ODD, MORE),
    "nan config": with_config('{"run": {"seed": NaN, "more": [Infinity, 1e999]}, "x": -Infinity}'),
    "deep": with_lines(DEEP, '{"batch_step": 1, "extra": ' + DEEP + "}"),
    "deep config": with_config(DEEP),
    "no object": with_config("[1]"),
    "no text": with_config("\x00\x1f"),
    "odd names": with_lines(NAMES),
    "fifo config": with_fifo("config.resolved.json"),
    "fifo log": with_fifo("training_log.jsonl"),
    "fifo lock": with_fifo(".lock"),
    "linked config": with_link("config.resolved.json"),
    "linked log": with_link("training_log.jsonl"),
    "linked completions": with_link("completions.jsonl"),
    "folder as log": with_folder("events.jsonl"),
}  # fmt: skip


def strict(text):
    """The JSON of a text, as a browser reads it."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_run_is_a_page_or_a_line(tmp_path, kind):
    """In strict JSON, without a file's content that is not the run's; the list and other runs are as ever."""
    FOREIGN[kind](make_run(tmp_path / "odd", end=None))
    make_run(tmp_path / "plain")
    site = Site(tmp_path)
    status, _, body = site.answer("/", HOST)
    assert status == 200 and b">odd<" in body and b">finished<" in body
    assert unpacked(site.answer("/run/plain/data", HOST))["completions"]["rows"] == 48
    for path in ("/run/odd/", "/run/odd/data", "/run/odd/part/0-0-48/texts", "/run/odd/evaluation/0-0-4"):
        status, _, body = site.answer(path, HOST)
        assert status in (200, 404, 503)
        content = zlib.decompress(body) if status == 200 and not path.endswith("odd/") else body
        assert b"secret-" not in content
        if content is not body:
            strict(content)
    try:
        page = write_report([tmp_path / "odd"], tmp_path / "page.html").path.read_text()
    except UserError as error:
        assert kind in (
            "linked log",
            "linked completions",
            "folder as log",
            "fifo log",
        ) and "cannot be read" in str(error)
        return
    for blob in re.findall(r'id="blob-\d+">([^<]*)<', page):
        text = zlib.decompress(base64.b64decode(blob))
        strict(text)
        assert b"secret-" not in text


def test_a_folder_that_may_not_be_read_spoils_no_list():
    """One without permission is left out; one whose name is not UTF-8, or with a closed file, is there."""
    place = Path(tempfile.mkdtemp())
    user = os.geteuid()
    try:
        make_run(place / "plain")
        make_run(Path(os.fsdecode(os.fsencode(place) + b"/caf\xe9")))
        (make_run(place / "locked") / "events.jsonl").chmod(0)
        make_run(place / "closed").chmod(0)
        place.chmod(0o755)
        site = Site(place)
        if not user:
            os.seteuid(65534)  # whom permissions bind
        status, _, body = site.answer("/", HOST)
        assert status == 200 and b">plain<" in body and b">closed<" not in body
        assert b"events.jsonl: cannot be read: Permission denied" in body
        (address,) = re.findall(rb'href="(run/caf[^"]*)"', body)
        assert site.answer(f"/{address.decode()}data", HOST)[0] == 200
        with pytest.raises(UserError, match="cannot be read"):
            write_report([place / "locked"], place / "page.html")
        with pytest.raises(UserError, match="cannot be read"):
            write_report([place / "closed"], place / "page.html")
    finally:
        os.seteuid(user)
        (place / "closed").chmod(0o755)
        shutil.rmtree(place)
