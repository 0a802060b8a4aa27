"""Reports of quickstarts that were stopped with Ctrl-C, or were killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runners.report import write_report
from tests.support.processes.waiting import HANGS
from tests.support.services.browsing import WAIT, opened, quiet
from tests.support.tiny_runs import PROBLEMS

ROOT = Path(__file__).resolve().parents[3]
SHORT = (
    f"data.source={PROBLEMS}",
    "data.eval_split=valid",
    "optim.batch_size=2",
    "eval.samples=4",
    "eval.every=2",
)


@pytest.fixture(scope="module", params=["stopped", "ended without a word"])
def ended(request, tmp_path_factory):
    """The folder of a quickstart that Ctrl-C or a kill ended after two updates, and its state."""
    folder = tmp_path_factory.mktemp("ended")
    sets = [word for each in (f"run.output_dir={folder}", *SHORT) for word in ("--set", each)]
    process = subprocess.Popen(
        [sys.executable, "-m", "runners.cli", "run", "quickstart", *sets],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        next(line for line in process.stdout if re.match(r"update +2/", line))
        if request.param == "stopped":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of the foreground
            printed, code = process.stdout.read(), process.wait(HANGS)
            assert code == 130 and "Traceback" not in printed and "interrupted: saved" in printed
    finally:
        process.kill()
        process.wait()
    return folder / "quickstart", request.param


def test_a_stopped_run_has_a_report_and_a_killed_one_has_none(ended):
    """The stopped one has a checkpoint and an end as well."""
    folder, state = ended
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    stopped = (last["event"], last.get("state")) == ("end", "stopped")
    assert (
        stopped
        == (folder / "report.html").is_file()
        == any(folder.glob("checkpoint-*"))
        == (state == "stopped")
    )


def test_a_report_in_a_browser_says_how_the_run_ended(tab, ended, tmp_path):
    """Of a killed run it is written later. It shows what there is."""
    folder, state = ended
    page = write_report([folder], tmp_path / "page.html").path
    opened(tab, page)
    assert tab.inner_text("#state") == state
    assert tab.locator('[data-chart="reward"] canvas').count() == 1
    assert "stopped: signal 2" in tab.inner_text("#events") or state != "stopped"
    tab.click("#tab-completions")
    tab.wait_for_selector(".card", timeout=WAIT)
    assert tab.locator(".card").count() == 8 and quiet(tab)
