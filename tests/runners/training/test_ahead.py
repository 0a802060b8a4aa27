"""Rollouts ahead of the learner are reproducible, complete, resumed bit for bit, and of limited age."""

import subprocess
import sys

import mlx.core as mx
import pytest

from runners.errors import ConfigError, RewardError
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import config_in, killed, lines_of, outcome, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits

CPU = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's sums have no fixed order")
CORRECTED = ("loss.correction=token_truncate", "optim.max_steps=8")
AHEAD = {
    staleness: (*CORRECTED, f"rollout.max_staleness={staleness}", "optim.num_epochs=3")
    for staleness in (0, 1, 2)
}


def log_of(folder):
    """The log lines of updates."""
    return [line for line in lines_of(folder / "training_log.jsonl") if "reward" in line]


@CPU
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_ahead_is_the_same_each_time_and_drops_nothing(tmp_path, staleness):
    """Two runs are equal bit for bit, with the prompts of a run without staleness and the set ages."""
    again = run_training(config_in(tmp_path / "a", *AHEAD[staleness]), report=Quiet())
    first = straight_run(*AHEAD[staleness])
    assert same_bits(again.state, first.state) and outcome(again.folder) == outcome(first.folder)
    ages = [line["staleness/mean"] for line in log_of(first.folder)]
    assert ages == [float(min(n, staleness)) for n in range(8)]
    plain = straight_run(*AHEAD[0])
    prompts = [
        [record["prompt"] for record in lines_of(run.folder / "completions.jsonl")] for run in (plain, first)
    ]
    assert prompts[0] == prompts[1]
    assert not same_bits(plain.state, first.state)
    assert "staleness/mean" not in log_of(plain.folder)[0]


CUTS = {
    "while the first batches are sampled": [("learning", 1)],
    "again and again": [("step", 2), ("sampling", 2), ("learning", 2), ("step", 1), ("eval", 1)],
    "in the last steps, in which no batch is ahead": [("step", 7), ("saving the final", 1)],
    "after an update": [("step", 3)],
}
KINDS = {
    "full": AHEAD[1],
    "two updates": AHEAD[2],
    "adapters": (*AHEAD[1], "model.tune=lora", "model.lora={rank=4}"),
    "accumulated": (*AHEAD[1], "optim.gradient_accumulation_steps=2"),
    "few bits": (*AHEAD[1], "rollout.quantization=affine-4", "rollout.group_size=32"),
    "adaptive": (*AHEAD[2], "data.curriculum=adaptive", "data.pass_reward=0.5"),
}


@CPU
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        *((kind, cut) for kind in ("full", "two updates") for cut in [*CUTS][:3]),
        *((kind, "after an update") for kind in [*KINDS][2:]),
    ],
)
def test_an_interrupted_run_is_resumed_bit_for_bit(tmp_path, kind, cut):
    """Rollouts in progress are sampled again with the weights of their version, which a message names."""
    config = config_in(tmp_path / "a", *KINDS[kind])
    resume = False
    for what, count in CUTS[cut]:
        killed(config, what, count, resume=resume)
        resume = True
    notes = Notes()
    again = run_training(config, report=notes, resume=True)
    straight = straight_run(*KINDS[kind])
    assert same_bits(again.state, straight.state) and outcome(again.folder) == outcome(straight.folder)
    flying = [line for line in notes.lines if "was in progress: it is sampled again" in line]
    assert cut == "after an update" or bool(flying) == (cut == "again and again"), notes.lines


def test_ages_are_limited_with_several_batch_steps_per_update():
    """Ages count updates, not batch steps."""
    log = log_of(straight_run(*KINDS["accumulated"]).folder)
    assert [line["staleness/max"] for line in log] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("loss.correction=none",), "rollout.max_staleness"),
        (("loss.dynamic_sampling=true",), "loss.dynamic_sampling"),
        (("loss.sync_every=2",), "loss.sync_every"),
        (("optim.num_iterations=2",), "rollout.max_staleness"),
        (("loss.router_replay=true",), "loss.router_replay"),
        (("ranks.samplers=1", "rollout.max_staleness=0"), "ranks.samplers"),
        (("ranks.samplers=1", "rollout.quantization=affine-4"), "rollout.quantization"),
        (("ranks.samplers=1", "env.program=['agent']"), "env.program"),
        (("ranks.samplers=1", "env.taskset=verifiers:wordle"), "env.taskset"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, settings, key):
    """The error names the key and the expected value."""
    with pytest.raises(ConfigError, match=rf"{key}: expected .*found"):
        config_in(tmp_path / "a", *AHEAD[1], *settings).check()


def test_ipo_needs_no_correction(tmp_path):
    """IPO compares with the weights that sampled a completion."""
    config = config_in(tmp_path / "a", *AHEAD[1], "loss.correction=none", "loss.surrogate=ipo").check()
    assert config.loss_spec().correction == "none"


THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor

import grpo_fn
import mlx.core as mx
from runners.training import ahead

def product():
    square = mx.random.normal((64, 64))
    mx.eval(square @ square)

pools = [ThreadPoolExecutor(1, "own", ahead._free_streams_at_end) for _ in range(4)]
for pool in pools:
    pool.submit(product).result()
"""


def test_threads_of_a_run_end_without_streams():
    """With open streams, MLX aborts about every third process that ends soon after its threads."""
    ended = [subprocess.run([sys.executable, "-c", THREADS], check=False).returncode for _ in range(8)]
    assert ended == [0] * 8


def test_a_failing_reward_ends_the_run(tmp_path):
    """The error of the thread is raised in the main thread."""
    (tmp_path / "bad.py").write_text("def bad(completions, **_):\n    raise ValueError('no')\n")
    config = config_in(tmp_path / "a", *AHEAD[1], f'reward.functions=["{tmp_path}/bad.py:bad"]')
    with pytest.raises(RewardError, match="no"):
        run_training(config, report=Quiet())
