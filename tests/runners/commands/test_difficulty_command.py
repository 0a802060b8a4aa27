"""`grpo difficulty` measures pass rates of the training prompts and resumes; docs/cold-start.md."""

import json
import shlex
from pathlib import Path

import pytest

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.pages import ROOT, snippets
from tests.support.resuming import config_in, lines_of

PAGE = ROOT / "docs" / "cold-start.md"
FEW = ["data.max_samples=6", "rollout.max_new_tokens=4", "rollout.max_batch=6", "rollout.launch=eval"]
SHORT = ["optim.max_steps=1", "eval.samples=1", "rollout.num_generations=6", "checkpoint.every=0"]


def keys(settings):
    """The settings as options."""
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture
def measure(tmp_path):
    """Runs `grpo difficulty` for a tiny run's config in a new folder."""
    config_in(tmp_path / "runs")
    settings = keys(["data.pass_reward=0.5", "rollout.max_batch=6", "data.max_samples=6"])
    command = ["difficulty", "train.toml", "--samples", "3", "--out", "rates.jsonl", *settings]
    return lambda *more, code=0: grpo(*command, *more, code=code)


def test_a_measurement_goes_on_where_it_ended(measure):
    """A file cut within a line is completed; one with another seed is refused or starts over."""
    result, file = measure(), Path("rates.jsonl")
    whole = file.read_bytes()
    lines = lines_of(file)
    assert [line["number"] for line in lines] == list(range(6))
    assert {line["samples"] for line in lines} == {3}
    assert 0 < sum(line["passes"] for line in lines) < 18
    assert "6 of 6 prompts" in result.stderr
    assert result.stdout.startswith("6 prompts; ") and "never passed" in result.stdout
    cut = whole.find(b"\n", len(whole) // 2) + 9
    file.write_bytes(whole[:cut])
    measure()
    assert file.read_bytes() == whole
    again = measure()
    assert (again.stdout, file.read_bytes()) == (result.stdout, whole)
    assert "--overwrite starts over" in measure("--set", "run.seed=1", code=2).stderr
    measure("--set", "run.seed=1", "--overwrite")
    assert file.read_bytes() != whole
    assert Path("rates.previous.jsonl").read_bytes() == whole


def test_the_page_as_it_stands(tmp_path):
    """Its command and both configs run; its keys are those of the file, its metrics those of the log."""
    found = list(snippets(PAGE))
    Path("train.toml").write_text('[model]\npath = "embedded"\n[data]\nsource = "embedded"\n')
    lines = [line for s in found if s.language == "sh" for line in s.text.splitlines()]
    (line,) = [line for line in lines if line.startswith("grpo difficulty")]
    grpo(*shlex.split(line)[1:], *keys(FEW))
    measured = lines_of(Path("outputs/grpo.difficulty.jsonl"))
    assert all(f"`{key}`" in PAGE.read_text() for key in measured[0])
    for name, more in {"static.toml": ["data.pass_rates=[0.0,1.0]"], "adaptive.toml": []}.items():
        (text,) = [s.text for s in found if s.comments.get("file") == name]
        Path(name).write_text(text)
        folder = run_training(load_config(name, [*FEW, *SHORT, *more]), report=Quiet()).folder
        log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
        shares = [line["groups/share/new"] for line in log if "groups/taught" in line]
        assert shares == [1.0 if name == "adaptive.toml" else 0.0]
        (folder / "training_log.jsonl").parent.rename(tmp_path / name.removesuffix(".toml"))
