"""Reports of quickstarts that finished, were stopped with Ctrl-C, or were killed; and `grpo-run --watch`."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from runners.report import RunRecord, write_report
from tests.support.processes.waiting import HANGS, wait_until
from tests.support.processes.warm_process import Popen
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


def started(folder, *settings):
    """`grpo-run quickstart --watch` in a session of its own, as in a terminal; and the page's address."""
    sets = [word for each in (f"run.output_dir={folder}", *SHORT, *settings) for word in ("--set", each)]
    process = Popen(
        [sys.executable, "-m", "runners.cli", "run", "quickstart", "--watch", *sets],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        session=True,
    )
    for line in process.stdout:
        if line.startswith("live page: "):
            return process, line.split()[-1]
    raise AssertionError("no live page")


def read_until(process, update):
    """Up to the line of an update; the run goes on for many more."""
    for line in process.stdout:
        if re.match(rf"update +{update}/", line):
            return
    raise AssertionError(f"the run ended before update {update}")


def answer(url, path):
    """Status and place of an answer of the live page; None where nobody listens."""
    place = urlsplit(url)
    line = http.client.HTTPConnection(place.hostname, place.port, timeout=HANGS)
    try:
        line.request("GET", path)
        found = line.getresponse()
        return found.status, found.getheader("location")
    except ConnectionError:
        return None
    finally:
        line.close()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a quickstart that Ctrl-C ended after two updates, and what became of its live page."""
    folder = tmp_path_factory.mktemp("stopped")
    process, url = started(folder)
    try:
        read_until(process, 2)
        seen = answer(url, "/"), answer(url, "/run/quickstart/data")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of the foreground
        printed = process.stdout.read()
        code = process.wait(HANGS)
    finally:
        process.kill()
        process.wait()
    return {"folder": folder / "quickstart", "url": url, "seen": seen, "printed": printed, "code": code}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a quickstart that was killed after an update, with a report written later."""
    folder = tmp_path_factory.mktemp("killed")
    process, url = started(folder)
    try:
        read_until(process, 1)
    finally:
        process.kill()
        process.wait()
    return {"folder": folder / "quickstart", "url": url}


def state_of(folder):
    """What a report says of a run's state."""
    record = RunRecord(folder)
    record.refresh()
    return record.state()


def test_ctrl_c_ends_the_run_and_then_its_live_page(stopped):
    """The page answers until the run has saved, and ends with it; the run's code and files are as ever."""
    assert stopped["seen"] == ((303, "run/quickstart/"), (200, None))
    assert stopped["code"] == 130 and "Traceback" not in stopped["printed"]
    assert "interrupted: saved" in stopped["printed"]
    assert answer(stopped["url"], "/") is None
    folder = stopped["folder"]
    assert list(folder.glob("checkpoint-*")) and (folder / "report.html").is_file()
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["state"]) == ("end", "stopped") and state_of(folder) == "stopped"


def test_a_killed_run_takes_its_live_page_along(killed):
    """It leaves no report; one that is written later says that the run ended without a word."""
    wait_until(lambda: answer(killed["url"], "/") is None)
    assert not (killed["folder"] / "report.html").exists()
    assert state_of(killed["folder"]) == "interrupted"


def test_their_reports_in_a_browser(tab, stopped, killed, tmp_path):
    """Each says how its run ended, and shows what there is."""
    write_report([killed["folder"]], killed["folder"] / "report.html")
    states = {"stopped": stopped["folder"], "ended without a word": killed["folder"]}
    for state, folder in states.items():
        opened(tab, folder / "report.html")
        assert tab.inner_text("#state") == state
        assert tab.locator('[data-chart="reward"] canvas').count() == 1
        assert "stopped: signal 2" in tab.inner_text("#events") or state != "stopped"
        tab.click("#tab-completions")
        tab.wait_for_selector(".card", timeout=WAIT)
        tab.screenshot(path=tmp_path / f"{state}.png")
        assert tab.locator(".card").count() == 8 and quiet(tab)
        tab.goto("about:blank")
