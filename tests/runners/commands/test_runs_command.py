"""`grpo runs` shows state, progress and results of each run, and a command that resumes it."""

import json
import os
import shlex
import shutil

import pytest

from runners.checkpoints.run_folder import locked
from runners.checkpoints.run_list import find_runs, summarize
from runners.config.loading import load_config
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.resuming import lines_of
from tests.support.tiny_runs import Notes, small


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A finished run, one interrupted after its checkpoint, one stopped before any, and a damaged folder."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("done", "deep/cut"):
        text = small(run={"name": name, "output_dir": str(folder)}, checkpoint={"every": 1})
        (folder / "t.toml").write_text(text)
        run_training(load_config(str(folder / "t.toml"), ["eval.at_start=true"]), report=Notes())
    shutil.rmtree(folder / "deep/cut/final")
    shutil.rmtree(folder / "deep/cut/checkpoint-2")
    (folder / "early").mkdir()
    shutil.copy(folder / "done/config.resolved.json", folder / "early")
    (folder / "broken").mkdir()
    (folder / "broken/config.resolved.json").write_text("{")
    (folder / "broken/training_log.jsonl").write_bytes(
        b'{"update": 3, "reward": 0.5}\n[1]\n{"update": 4, "rew\xff'
    )
    (folder / "loop").symlink_to(folder)
    return folder


def test_every_run_is_listed_with_its_state(outputs):
    """Each is listed once, also in subfolders; exact match and updates come from the log."""
    found = {os.path.relpath(run.folder, outputs): run for run in find_runs(outputs)}
    states = {"done": "finished", "deep/cut": "interrupted", "early": "stopped", "broken": "stopped"}
    assert {name: run.state for name, run in found.items()} == states
    done, broken = found["done"], found["broken"]
    assert done.update == 2 and done.em is not None and done.reward is not None
    assert (broken.update, broken.reward, broken.em) == (3, 0.5, None)


def test_the_commands_go_on_with_a_run(outputs, tmp_path):
    """config.resolved.json resumes runs with or without a checkpoint, also after the folder was moved."""
    shown = grpo("runs", outputs)
    assert shown.output.splitlines()[0].split()[:3] == ["run", "state", "updates"]
    assert f"  grpo chat {outputs / 'done'}\n" in shown.output
    moved = tmp_path / "moved"
    shutil.copytree(outputs / "deep/cut", moved)
    early = tmp_path / "early"
    shutil.copytree(outputs / "done", early, ignore=shutil.ignore_patterns("final", "checkpoint-*"))
    assert summarize(early).state == "stopped"  # with a log
    for folder in (outputs / "deep/cut", moved, early):
        words = shlex.split(summarize(folder).go_on)
        assert words[0] == "grpo-run" and words[-1] == "--resume"
        grpo("run", *words[1:])
        assert summarize(folder).state == "finished"
        before, after = (lines_of(run / "training_log.jsonl") for run in (outputs / "done", folder))
        assert [line.get("loss") for line in after] == [line.get("loss") for line in before]


def test_a_running_run_is_known_by_its_lock(outputs):
    """A run is running while a process holds the lock, although the file stays."""
    with locked(outputs / "early", "run.name"):
        run = summarize(outputs / "early")
    assert (run.state, run.go_on) == ("running", "")
    assert summarize(outputs / "early").state == "stopped"


def test_json_and_missing_folders(outputs, tmp_path):
    """JSON has one object per line; a folder without runs says so; a missing folder is an error."""
    lines = [json.loads(line) for line in grpo("runs", outputs, "--json").output.splitlines()]
    assert {line["state"] for line in lines} >= {"finished", "stopped"}
    (tmp_path / "empty").mkdir()
    assert grpo("runs", tmp_path / "empty").output == f"{tmp_path / 'empty'} contains no runs\n"
    assert "there is no such folder" in grpo("runs", tmp_path / "none", code=2).stderr
