"""Untrusted runs with odd values, links and fifos break neither their own page nor another run's."""

import base64
import json
import os
import re
import zlib

import pytest

from runners.errors import UserError
from runners.report.page import write_report
from runners.report.server import LivePage
from tests.runners.report.test_server import HOST
from tests.support.runs.report_runs import make_run

LOGS = ("training_log", "events", "completions", "evaluations")
ODD = '{"update": NaN, "event": "note", "reward": -Infinity, "time": 1e999, "n": NaN, "rows": [[NaN]]}'
MORE = '{"metrics": {"a": NaN}, "extra": {"b": 1e999}, "messages": [NaN], "rewards": {"c": NaN}}'
NAMES = '{"update": 1, "__proto__": 1, "constructor": 2, "\\ud800": 3, "": 4}'
CONTEXTS = ('"x"', "[1]", '[{"role": 3, "content": [{}]}]', '[{"content": null}]')
DEEP = '{"a":' * 900 + "1" + "}" * 900


def add(folder, *lines):
    """Appends lines to each log."""
    for name in LOGS:
        with open(folder / f"{name}.jsonl", "a") as stream:
            stream.write("".join(f"{line}\n" for line in lines))


def link(folder, name):
    """Replaces a file by a link to a file outside the run."""
    secret = folder.parent / "secret.json"
    line = '{"event": "note", "update": 1, "text": "secret-1", "completion": "secret-2", "secret-3": 3}\n'
    secret.write_text(line * (1 if name == CONFIG else 1000))
    replace(folder / name).symlink_to(secret)


def replace(file):
    """The path, after deleting its file."""
    file.unlink(missing_ok=True)
    return file


CONFIG = "config.resolved.json"
FOREIGN = {
    "nan": lambda run: add(run, ODD, MORE),
    "nan config": lambda run: (run / CONFIG).write_text(
        '{"run": {"seed": NaN, "more": [Infinity, 1e999]}, "x": -Infinity}'
    ),
    "deep": lambda run: add(run, DEEP, '{"batch_step": 1, "extra": ' + DEEP + "}"),
    "deep config": lambda run: (run / CONFIG).write_text(DEEP),
    "no object": lambda run: (run / CONFIG).write_text("[1]"),
    "no text": lambda run: (run / CONFIG).write_text("\x00\x1f"),
    "odd names": lambda run: add(run, NAMES),
    "odd prompts": lambda run: add(run, *(f'{{"update": 1, "context": {each}}}' for each in CONTEXTS)),
    "fifo config": lambda run: os.mkfifo(replace(run / CONFIG)),  # to open it waits
    "fifo log": lambda run: os.mkfifo(replace(run / "training_log.jsonl")),
    "fifo lock": lambda run: os.mkfifo(replace(run / ".lock")),
    "linked config": lambda run: link(run, CONFIG),
    "linked log": lambda run: link(run, "training_log.jsonl"),
    "linked completions": lambda run: link(run, "completions.jsonl"),
    "folder as log": lambda run: replace(run / "events.jsonl").mkdir(),
}
UNREADABLE = ("linked log", "linked completions", "folder as log", "fifo log")
REFUSED = {"nan": "cannot be shown in a page", **dict.fromkeys(UNREADABLE, "cannot be read")}


def strict(text):
    """Parses a text as strictly as a browser."""
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_run_is_a_page_or_a_line(tmp_path, kind):
    """The data are strict JSON and contain nothing of files outside the run."""
    FOREIGN[kind](make_run(tmp_path / "odd", end=None))
    status, _, body = LivePage(tmp_path / "odd").answer("/data", HOST)
    try:
        page = write_report([tmp_path / "odd"], tmp_path / "page.html").path.read_text()
    except UserError as error:
        assert status == 503 and REFUSED[kind] in str(error) and b"secret-" not in body
        return
    assert status == 200
    blobs = [
        zlib.decompress(base64.b64decode(blob)) for blob in re.findall(r'id="blob-[^"]+">([^<]*)<', page)
    ]
    for text in (zlib.decompress(body), *blobs):
        strict(text)
        assert b"secret-" not in text
