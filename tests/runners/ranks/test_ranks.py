"""Runs on several ranks, as processes under mlx.launch: what one rank gives, and one end for all."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from runners.checkpoints.manifest import check_manifest
from runners.config.loading import load_config
from runners.metrics import METRICS
from runners.quickstart import MODEL_DIR
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.closeness import assert_same_figures, assert_same_weights
from tests.support.ranks.launching import launch
from tests.support.tiny_runs import small

FAULT = '''"""A reward that ends rank 1 in its third call."""

import os

calls = []


def fault(completions, **_):
    calls.append(1)
    if os.environ.get("MLX_RANK") == "1" and len(calls) == 3:
        os.kill(os.getpid(), 9)
    return [float(len(set(completion[0]["content"]))) for completion in completions]
'''
FIGURES = {"reward", "loss", "grad_norm", "em", "num_tokens", "frac_reward_zero_std"}


def write(folder: Path, name: str, **tables) -> Path:
    path = folder / f"{name}.toml"
    settings = {
        "rollout": {"max_new_tokens": 16, "launch": "eval", "check_every": 8, "max_batch": 64},
        "optim": {"batch_size": 5, "max_steps": 3, "learning_rate": 3e-4},
        "eval": {"samples": 3, "at_start": False},
        "checkpoint": {"every": 1},
        **tables,
    }
    path.write_text(small(run={"name": name, "output_dir": str(folder / "outputs")}, **settings))
    return path


def lines(folder: Path, file: str) -> list[dict]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The folder of a run of three updates in this process alone."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_training(load_config(str(write(folder, "one"))), report=Quiet()).folder


@pytest.fixture(scope="module")
def three(one) -> Path:
    """The same on three ranks, of which the batch of five prompts is no multiple."""
    done = launch(3, write(one.parents[1], "three"))
    folder = one.with_name("three")
    assert (folder / "final").is_dir(), done.stdout
    assert done.stdout.count("finished in") == 1  # rank 0 speaks alone
    return folder


def test_three_ranks_train_as_one(one, three):
    """The same completions, rewards and advantages in the same order; weights to rounding; whole metrics."""
    same = ("batch_step", "prompt", "completion", "reward", "tokens")
    want, found = lines(one, "completions.jsonl"), lines(three, "completions.jsonl")
    assert [[line[key] for key in same] for line in found] == [[line[key] for key in same] for line in want]
    np.testing.assert_allclose([line["advantage"] for line in found], [line["advantage"] for line in want])
    assert_same_weights(three / "final", one / "final", MODEL_DIR)
    for left, right in zip(lines(one, "training_log.jsonl"), lines(three, "training_log.jsonl"), strict=True):
        assert_same_figures(right, left, FIGURES & left.keys())
    last = lines(three, "training_log.jsonl")[-2]
    assert last["ranks/number"] == 3
    assert {f"ranks/rollout_seconds/{rank}" for rank in range(3)} <= last.keys()
    listed = {re.sub(r"(rewards|rollout_seconds)/[^/]+", r"\1/{name}", name) for name in last}
    assert listed - METRICS.keys() == set(), "logged, and not in the table"
    assert 0 <= last["ranks/slowest"] < 3


def test_a_checkpoint_goes_on_with_another_number_of_ranks(one, three):
    """Saved by three ranks, gone on with by two: the same end, to rounding."""
    config = write(one.parents[1], "three", optim={"batch_size": 5, "max_steps": 3, "learning_rate": 3e-4})
    before = shutil.copytree(three / "final", three / "before")
    done = launch(2, config, "--resume", str(three / "checkpoint-1"))
    assert "resuming from" in done.stdout, done.stdout
    assert_same_weights(three / "final", before, MODEL_DIR)
    assert (three / "checkpoint-2.aside").is_dir()


def test_a_killed_rank_ends_all_with_its_name(one):
    """The others end, a line and the log name the rank, and the last checkpoint is whole."""
    folder = one.parents[1]
    (folder / "fault.py").write_text(FAULT)
    config = write(
        folder,
        "killed",
        reward={"functions": ["fault.py:fault"], "timeout": 0},  # in the rank's own process
        optim={"batch_size": 2, "max_steps": 5},
    )
    done = launch(2, config)
    assert "rank 1 (" in done.stdout, done.stdout
    assert "is gone: it was killed, or has crashed" in done.stdout
    fault = lines(folder / "outputs/killed", "training_log.jsonl")[-1]["fault"]
    assert fault.startswith("rank 1 (")
    check_manifest(folder / "outputs/killed/checkpoint-2")
    assert not (folder / "outputs/killed/final").exists()
