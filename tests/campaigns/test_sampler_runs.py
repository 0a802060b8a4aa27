"""Separate samplers as processes: they compute what one device does, and end together."""

import os
import signal

import mlx.core as mx
import pytest

from runners.config.loading import load_config
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.runners.ranks.test_samplers import AHEAD
from tests.support.ranks.launching import begin, config_writer
from tests.support.resuming import lines_of, outcome

CPU = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's sums have no fixed order")
APART = ("--set", "ranks.samplers=1")
LORA = {"model": {"path": "embedded", "tune": "lora", "lora": {"rank": 4}}, "optim": {"max_steps": 5}}
TOOLS = {
    "model": {"path": "embedded-tools"},
    "data": {"source": "embedded-tools", "eval_split": "test", "nudge": "", "max_samples": 16},
    "env": {"tools": ["runners.environments.calculator:calculate"], "max_turns": 2},
    "rollout": {"max_staleness": 2, "max_new_tokens": 28, "temperature": 1.3},
    "optim": {"max_steps": 3},
}


@pytest.fixture
def write(tmp_path):
    """Writes a config in `tmp_path`; its path."""
    make = config_writer(tmp_path)

    def ahead(name, **tables):
        return make(name, **{key: AHEAD.get(key, {}) | tables.get(key, {}) for key in {**AHEAD, **tables}})

    return ahead


def straight_outcome(config, folder):
    """What a run on one device leaves; it is renamed to `folder`."""
    ran = run_training(load_config(str(config)), report=Quiet()).folder
    found = outcome(ran)
    ran.rename(folder)
    return found


@CPU
@pytest.mark.parametrize("tables", [{}, LORA, TOOLS], ids=["full", "lora", "tools"])
def test_a_rank_that_samples_changes_nothing_but_the_time(write, tmp_path, tables):
    """Weights, log and completions of one device, to the bit."""
    config = write("run", **tables)
    want, run = straight_outcome(config, tmp_path / "alone"), tmp_path / "outputs/run"
    said = begin(2, tmp_path / "ranks", [str(config), *APART]).end()
    assert said.count("finished in") == 1, said
    assert outcome(run) == want
    logs = [lines_of(folder / "training_log.jsonl") for folder in (run, tmp_path / "alone")]
    assert [line.keys() for line in logs[0]] == [line.keys() for line in logs[1]]


@CPU
def test_a_hung_sampler_is_named(write, tmp_path):
    """After the time limit, the run ends with one message, and one device finishes it to the bit."""
    config = write("run")
    want = straight_outcome(config, tmp_path / "straight")
    options = [str(config), *APART, "--set", "system.collective_timeout=15"]
    hooks = ("linger", "1", "runners.engines.local:LocalEngine._step", "45", "600")
    said = begin(2, tmp_path / "ranks", options, *hooks).end(120)
    told = [line for line in said.splitlines() if "waited for rank 1 (" in line]
    assert len(told) == 1 and "Traceback" not in said, said
    run_training(load_config(str(config)), report=Quiet(), resume=True)
    assert outcome(tmp_path / "outputs/run") == want


@CPU
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_either_rank_saves_and_the_run_goes_on(write, tmp_path, rank):
    """Rank 0 says how; the other ends when it has saved."""
    config = write("run")
    want = straight_outcome(config, tmp_path / "straight")
    hooks = ("linger", "0", "runners.training.gradients:MicroBatches.gradients", "2", "600")
    run = begin(2, tmp_path / "ranks", [str(config), *APART, "--set", "checkpoint.every=0"], *hooks)
    assert run.wait_until((tmp_path / "ranks/0.there").exists), run.said()
    pid = run.pid(rank)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    said = run.end(60)
    assert said.count("interrupted\nto continue: mlx.launch ... ") == 1 and "Traceback" not in said, said
    run = begin(2, tmp_path / "ranks", [str(config), *APART, "--resume"])
    assert "was in progress: it is sampled again" in run.end()
    assert outcome(tmp_path / "outputs/run") == want
