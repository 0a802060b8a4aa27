"""Rollouts ahead of the learner: the same each time, none dropped, resumed bit for bit, and never older."""

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
    """The lines of updates."""
    return [line for line in lines_of(folder / "training_log.jsonl") if "reward" in line]


@CPU
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_ahead_is_the_same_each_time_and_drops_nothing(tmp_path, staleness):
    """Bit for bit; its prompts are those of a run without; its ages are those that were asked for."""
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
    "in the last steps, of which no batch is ahead": [("step", 7), ("saving the final", 1)],
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
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["full", "two updates"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(tmp_path, kind, cut):
    """What was in flight is sampled again, with the weights of its version, and the log says which."""
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
    assert bool(flying) == (cut == "again and again"), notes.lines


@CPU
@pytest.mark.parametrize("kind", [*KINDS][2:])
def test_other_kinds_of_runs_go_on_bit_for_bit_too(tmp_path, kind):
    """Adapters, several batch steps an update, calibrated few-bit samplers, and prompts drawn by weight."""
    config = config_in(tmp_path / "a", *KINDS[kind])
    killed(config, "step", 3)
    again = run_training(config, report=Quiet(), resume=True)
    straight = straight_run(*KINDS[kind])
    assert same_bits(again.state, straight.state) and outcome(again.folder) == outcome(straight.folder)


def test_no_row_is_older_than_asked_with_several_batch_steps_an_update():
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
def test_what_does_not_fit_is_refused(tmp_path, settings, key):
    """With the key and what is expected."""
    with pytest.raises(ConfigError, match=rf"{key}: expected .*found"):
        config_in(tmp_path / "a", *AHEAD[1], *settings).check()


def test_ipo_needs_no_correction(tmp_path):
    """It compares with the weights that sampled a completion, and takes none."""
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
    """Otherwise MLX aborts every third process that ends at once after such threads."""
    ended = [subprocess.run([sys.executable, "-c", THREADS], check=False).returncode for _ in range(8)]
    assert ended == [0] * 8


def test_a_reward_that_fails_ends_the_run_as_ever(tmp_path):
    """Its error comes out of its thread."""
    (tmp_path / "bad.py").write_text("def bad(completions, **_):\n    raise ValueError('no')\n")
    config = config_in(tmp_path / "a", *AHEAD[1], f'reward.functions=["{tmp_path}/bad.py:bad"]')
    with pytest.raises(RewardError, match="no"):
        run_training(config, report=Quiet())
