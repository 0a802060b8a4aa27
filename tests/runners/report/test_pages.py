"""The page as a file: its content and place, and the events that a run records."""

import base64
import json
import re
import shutil
import signal
import zlib

import pytest

from runners.config.loading import load_config
from runners.machine.signals import Stopped
from runners.report.page import write_report
from runners.telemetry.events import Status
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.runs.report_runs import HOSTILE, make_run
from tests.support.tiny_runs import small


def blobs(text: str) -> list:
    """The decompressed pieces of a page."""
    found = re.findall(r'<script type="application/octet-stream" id="blob-[^"]+">([^<]*)</script>', text)
    return [json.loads(zlib.decompress(base64.b64decode(blob))) for blob in found]


def test_everything_is_in_the_file(tmp_path):
    """It contains metrics, events, config and completions, and loads nothing from elsewhere."""
    folder = make_run(tmp_path / "run")
    written = write_report([folder], tmp_path / "page.html")
    text = written.path.read_text(encoding="utf-8")
    (run,) = blobs(text)[-1]["runs"]
    assert (run["name"], run["state"], written.completions) == ("run", "finished", 48)
    assert run["metrics"]["columns"]["reward"][-2:] == [0.6, None]
    assert not re.search(r'(src|href)\s*=\s*["\']?(https?:)?//', text)
    assert "default-src 'none'" in text and "connect-src 'none'" in text


def test_no_text_of_a_run_stands_in_the_page_as_it_is(tmp_path):
    """Names and completions are compressed or escaped, so none of their tags is in the file."""
    folder = make_run(tmp_path / "run", texts=HOSTILE, name="</title><script>bad()")
    text = write_report([folder], tmp_path / "page.html").path.read_text(encoding="utf-8")
    assert "bad()" not in text.replace("&lt;script&gt;bad()", "") and "window.ran" not in text
    completions = [text for blob in blobs(text) for text in blob.get("completion", [])]
    assert {*HOSTILE} <= {*completions}


def test_the_command_writes_a_page(tmp_path):
    """One run's page is written to its folder, several runs' page to --out."""
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    assert "there is no such folder" in grpo("report", "nowhere", code=2).output
    grpo("report", one)
    assert (one / "report.html").is_file()
    out = tmp_path / "both.html"
    grpo("report", one, two, "--out", out)
    assert len(blobs(out.read_text(encoding="utf-8"))[-1]["runs"]) == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a real run of two updates."""
    folder = tmp_path_factory.mktemp("run")
    config = folder / "train.toml"
    config.write_text(small(run={"output_dir": str(folder)}, loss={"sync_every": 2}, eval={"at_start": True}))
    return run_training(load_config(str(config)), report=Quiet()).folder


def lines(folder, name):
    """The objects in one of a run's files."""
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_a_run_keeps_a_diary_and_its_held_out_texts(trained):
    """It records its start and end, and each problem of each evaluation."""
    events = lines(trained, "events.jsonl")
    assert [event["event"] for event in events if event["event"] != "note"] == ["start", "end"]
    assert events[0]["updates"] == 2 and "loss.sync_every" in events[0]["given"]
    assert events[0]["versions"]["mlx"] and events[-1]["state"] == "finished"
    records = lines(trained, "evaluations.jsonl")
    assert [(each["update"], each["problem"]) for each in records] == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_run_writes_its_report_at_the_end(trained):
    """The report says that the run is finished, although its process is still alive."""
    (run,) = blobs((trained / "report.html").read_text(encoding="utf-8"))[-1]["runs"]
    assert run["state"] == "finished" and run["completions"]["rows"] == 16


class Interrupted(Quiet):
    """Simulates Ctrl-C in the first rollout."""

    def handle(self, event):
        """Raises the interrupt when the rollout starts."""
        if event == Status("sampling"):
            signal.raise_signal(signal.SIGINT)


def test_a_report_without_a_log_knows_how_its_run_ended(trained, tmp_path):
    """The state is stopped, and nothing of an earlier run is shown."""
    shutil.copytree(trained, tmp_path / "small")
    (tmp_path / "train.toml").write_text(small())
    quiet = ["log.jsonl=false", "log.completions=false", f"run.output_dir={tmp_path}"]
    with pytest.raises(Stopped):
        config = load_config(str(tmp_path / "train.toml"), quiet)
        run_training(config, report=Interrupted(), overwrite=True)
    (run,) = blobs((tmp_path / "small/report.html").read_text(encoding="utf-8"))[-1]["runs"]
    assert run["state"] == "stopped"
    assert (run["metrics"]["lines"], run["completions"]["rows"], run["evaluations"]) == (0, 0, [])
    assert (tmp_path / "small/training_log.previous.jsonl").is_file()
