"""Ranks as real processes: runs equal those of one rank, and all ranks end together."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from runners.checkpoints.manifest import check_manifest
from runners.config.loading import load_config
from runners.metrics import METRICS
from runners.quickstart import MODEL_DIR, MODELS
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.closeness import assert_same_figures, assert_same_weights
from tests.support.ranks.launching import ROOT, begin, config_writer
from tests.support.resuming import lines_of

FAULT = '''"""A reward that ends rank 1 in its third call."""

import os

calls = []


def fault(completions, **_):
    calls.append(1)
    if os.environ.get("MLX_RANK") == "1" and len(calls) == 3:
        os.kill(os.getpid(), 9)
    return [float(len(set(completion[0]["content"]))) for completion in completions]
'''


def lines(folder: Path, file: str) -> list[dict]:
    return lines_of(folder / file)


@pytest.fixture
def write(tmp_path):
    """Writes a config to `tmp_path` and returns its path."""
    return config_writer(tmp_path)


def test_a_run_continues_on_other_numbers_of_ranks_and_sigterm_saves(write, tmp_path):
    """One rank saves between two batch steps of an accumulation, two continue until SIGTERM to rank 1, one
    continues again. The result equals an uninterrupted run's, with the curriculum's estimates.
    """
    tables = {
        "data": {"curriculum": "adaptive", "explore": 0.25, "pass_reward": 0.5},
        "optim": {"gradient_accumulation_steps": 2, "max_steps": 4},
        "reward": {"functions": ["letters.py:sums"]},  # each batch step has a gradient
        "rollout": {"temperature": 1.5},
    }
    config = write("sums", **tables)
    straight = run_training(load_config(str(config)), report=Quiet()).folder
    before = shutil.copytree(straight, tmp_path / "straight")
    options = [str(config), "--resume", str(straight / "checkpoint-1")]
    log = straight / "completions.jsonl"
    run = begin(2, tmp_path / "ranks", options)
    assert run.wait_until(lambda: log.read_bytes().count(b"\n") == 24), run.said()  # two batch steps
    pid = run.pid(1)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    said = run.end()
    assert "checkpoint-1" in said
    assert "interrupted" in said, said
    assert said.count("to continue:") == 1  # only rank 0 reports
    end = run_training(load_config(str(config)), report=Quiet(), resume=True).folder
    assert_same_weights(end / "final", before / "final", MODEL_DIR)
    assert lines(end, "completions.jsonl") == lines(before, "completions.jsonl")
    logs = (lines(folder, "training_log.jsonl") for folder in (end, before))
    for found, want in zip(*logs, strict=True):
        assert_same_figures(found, want, {"grad_norm"} & want.keys())


def test_three_ranks_with_tools_train_as_one(write, tmp_path):
    """Conversations, rewards and metrics equal those of one rank, and weights up to rounding, although the
    batch size is no multiple of three. Only rank 0 reports.
    """
    tables = {
        "model": {"path": "embedded-tools"},
        "data": {"source": "embedded-tools", "eval_split": "test", "nudge": "", "max_samples": 16},
        "env": {"tools": ["runners.environments.calculator:calculate"], "max_turns": 2},
        "rollout": {"num_generations": 6, "max_new_tokens": 28, "temperature": 1.3},
        "reward": {"functions": ["correctness_reward_func", "letters.py:sums"]},
        "optim": {"batch_size": 4, "max_steps": 2, "learning_rate": 1e-5},
        "eval": {"samples": 5, "max_new_tokens": 28},
        "checkpoint": {"every": 0},
    }
    alone = run_training(load_config(str(write("alone", **tables))), report=Quiet()).folder
    said = begin(3, tmp_path / "ranks", [str(write("three", **tables))]).end()
    three = alone.with_name("three")
    assert said.count("finished in") == 1, said
    want, found = lines(alone, "completions.jsonl"), lines(three, "completions.jsonl")
    assert [{**row, "advantage": 0} for row in found] == [{**row, "advantage": 0} for row in want]
    advantages = np.array([[row["advantage"] for row in rows] for rows in (found, want)])
    np.testing.assert_allclose(advantages[0], advantages[1], atol=1e-6)
    assert_same_weights(three / "final", alone / "final", MODELS["embedded-tools"])
    clock, logged = re.compile(r"^(time/|memory/|ranks/|step_time|tokens_per_second)"), set()
    for one, two in zip(lines(alone, "training_log.jsonl"), lines(three, "training_log.jsonl"), strict=True):
        names = [name for name in one if not clock.match(name)]
        assert names == [name for name in two if not clock.match(name)]
        assert_same_figures(two, one, names)
        logged |= two.keys()
    assert {"tools/call_frequency", "turns/mean", "eval/tool_calls", "grad_norm"} <= logged
    assert {"ranks/slowest", *(f"ranks/rollout_seconds/{rank}" for rank in range(3))} <= logged
    listed = {re.sub(r"(rewards|rollout_seconds)/[^/]+", r"\1/{name}", name) for name in logged}
    assert listed - METRICS.keys() == set(), "logged, and not in the table"


def test_a_file_that_one_rank_lacks_is_reported_in_one_line(write, tmp_path):
    """The line names the rank, its host and the file, and nothing is trained."""
    config = write("missing", data={"source": "embedded"})
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as data:  # a longer path is cut in the line
        for rank, folder in enumerate((Path(data, "0"), Path(data, "1"))):
            folder.mkdir()
            if rank == 0:
                rows = '{"question": "1 + 1", "answer": "2"}\n' * 8
                (folder / "train.jsonl").write_text(rows)
                (folder / "valid.jsonl").write_text(rows)
        options = [str(config), "--set", f"data.source={data}/{{rank}}/train.jsonl"]
        run = begin(2, tmp_path / "ranks", options)
        said = run.end()
    told = [line for line in said.splitlines() if "no such file or folder" in line]
    assert len(told) == 1, said
    assert told[0].startswith(f"rank 1 ({os.uname().nodename}): ")
    assert f"{data}/1/train.jsonl" in told[0]
    assert not list((tmp_path / "outputs").glob("*/training_log.jsonl"))
    assert "Node with rank 1 exited with code 2" in said
    assert "Node with rank 0 exited with code" in said  # 2, or -15: the launcher may be faster than its end


STAGES = {
    # name: the function in which the ranks are, the number of its call, and the saved checkpoints
    "loading": ("runners.training.setup:load_model", 1, []),
    "learning": ("runners.training.gradients:MicroBatches.gradients", 2, ["checkpoint-2"]),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    config = config_writer(tmp_path_factory.mktemp("straight"))("straight")
    return run_training(load_config(str(config)), report=Quiet()).folder


@pytest.mark.parametrize(("stage", "rank"), [("loading", 1), ("learning", 0)])
def test_sigterm_to_a_rank_ends_all_and_the_run_can_be_resumed(write, tmp_path, straight, stage, rank):
    """Rank 0 shows how to resume, and saves the finished steps."""
    target, call, saved = STAGES[stage]
    config = write("early", checkpoint={"every": 0})
    run = begin(2, tmp_path / "ranks", [str(config)], "linger", "01", target, str(call), "600")
    there = [tmp_path / "ranks" / f"{each}.there" for each in (0, 1)]
    assert run.wait_until(lambda: all(file.exists() for file in there)), run.said()
    pid = run.pid(rank)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    said = run.end(60)
    # -15: once one has ended, the launcher stops the other, and may be faster than its end.
    codes = dict(re.findall(r"Node with rank (\d) exited with code (-?\d+)", said))
    assert codes.keys() == {"0", "1"} and set(codes.values()) <= {"143", "-15"}, said
    assert "143" in codes.values()
    assert said.count("interrupted\nto continue: mlx.launch ... ") == 1 and "Traceback" not in said, said
    folder = tmp_path / "outputs/early"
    assert [path.name for path in folder.glob("checkpoint-*")] == saved, said
    run_training(load_config(str(config)), report=Quiet(), resume=True)
    assert_same_weights(folder / "final", straight / "final", MODEL_DIR)


def test_a_killed_rank_ends_all_with_its_name(write, tmp_path):
    """The others end, a message and the log name the rank, and the last checkpoint is complete."""
    (tmp_path / "fault.py").write_text(FAULT)
    own = {"functions": ["fault.py:fault"], "timeout": 0}  # in the rank's own process
    config = write("killed", reward=own, optim={"batch_size": 2, "max_steps": 5})
    said = begin(2, tmp_path / "ranks", [str(config)]).end()
    assert "rank 1 (" in said and "has disappeared: it was killed or crashed" in said, said
    killed = tmp_path / "outputs/killed"
    assert lines(killed, "training_log.jsonl")[-1]["fault"].startswith("rank 1 (")
    check_manifest(killed / "checkpoint-2")
    assert not (killed / "final").exists()


def test_sigterm_ends_a_rank_that_waits_for_a_missing_rank(tmp_path):
    """MLX tries for 31 s to connect, and no Python code runs meanwhile."""
    (tmp_path / "hosts.json").write_text('[["127.0.0.1:9"], ["127.0.0.1:0"]]')
    code = (
        "import os, mlx.core as mx; from runners.machine.signals import StopSignals\n"
        "with StopSignals() as signals, signals.ending_at_once():\n"
        "    os.write(1, b'joining')\n"
        "    mx.distributed.init(strict=True, backend='ring')\n"
    )
    rank = {"MLX_RANK": "1", "MLX_HOSTFILE": str(tmp_path / "hosts.json"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **rank}, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.read(7) == b"joining"
        time.sleep(1)  # it is in MLX
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
