"""Evaluations during a run: one that would take too much of the run's time uses fewer problems."""

import json
from pathlib import Path

import pytest

from runners.config.loading import load_config
from runners.engines.local import LocalEngine
from runners.training import evaluation
from runners.training.train import run_training
from tests.support.tiny_runs import Notes, small

# Two completions of four prompts: the run costs about as much as 16 problems, a fifth of it is 3.
SETTINGS = {"optim": {"max_steps": 1, "batch_size": 2}, "eval": {"samples": 12, "at_start": True}}


@pytest.mark.parametrize(("share", "seconds", "used"), [(0.2, 0.0, 3), (0.2, 60.0, 12), (1.0, 0.0, 12)])
def test_an_evaluation_that_takes_too_long_uses_fewer_problems(tmp_path, monkeypatch, share, seconds, used):
    """All of the run use the same ones, and a line says so; not below a minute, nor if forbidden."""
    monkeypatch.setattr(evaluation, "LONG", seconds)
    monkeypatch.setattr(evaluation, "FEW", 2)
    path, notes = tmp_path / "train.toml", Notes()
    eval_keys = SETTINGS["eval"] | {"time_share": share}
    path.write_text(
        small(run={"name": "r", "output_dir": str(tmp_path)}, optim=SETTINGS["optim"], eval=eval_keys)
    )
    result = run_training(load_config(str(path)), report=notes)
    assert any(f"its evaluations use {used};" in line for line in notes.lines) == (used < 12)
    log = [json.loads(line) for line in (Path(result.folder) / "training_log.jsonl").read_text().splitlines()]
    assert [row["em_subset"] for row in log if "em_subset" in row] == [used, used]
    records = (Path(result.folder) / "evaluations.jsonl").read_text().splitlines()
    asked = [json.loads(line)["prompt"] for line in records]
    assert sorted(asked[:used]) == sorted(asked[used:]) and len(asked) == 2 * used


def test_an_evaluation_that_runs_out_of_memory_is_repeated_and_says_so(tmp_path, monkeypatch):
    """As a rollout does: the line is the evaluation's."""
    sampled, tries = LocalEngine._sampled, []

    def short(engine, *rest):
        tries.append(engine)
        if len(tries) == 1:
            raise RuntimeError("out of memory")
        return sampled(engine, *rest)

    monkeypatch.setattr(LocalEngine, "_sampled", short)
    path, notes = tmp_path / "train.toml", Notes()
    path.write_text(small(run={"name": "r", "output_dir": str(tmp_path)}, **SETTINGS))
    assert run_training(load_config(str(path)), report=notes).first_em is not None
    assert sum(line.startswith("out of memory") for line in notes.lines) == 1
