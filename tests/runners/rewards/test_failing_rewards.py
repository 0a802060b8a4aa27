"""Rewards that fail for every completion of a batch step end the run, which can be resumed."""

import signal

import pytest

from runners.checkpoints.run_folder import checkpoint_folders
from runners.errors import RewardError
from runners.machine.signals import Stopped
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import SHORT, Killer, config_in, outcome, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits

FAILS_WHERE_BROKEN = """
import pathlib, time, zlib

def letters(completions, trainer_state, **_):
    if trainer_state.global_step >= 2 and pathlib.Path(__file__).with_name("broken").exists():
        raise ConnectionError("the judge does not answer")
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]

def slow(completions, trainer_state, **_):
    steps = pathlib.Path(__file__).with_name("slow").read_text().split()
    if str(trainer_state.global_step) in steps:
        time.sleep(600)
    return [float(n % 2) for n in range(len(completions))]
"""
FAILS_AT_THE_THIRD_CALL = """
calls = []

def fails(completions, **_):
    calls.append(1)
    if len(calls) == 3:
        raise OSError("not now")
    return [float(n % 2) for n in range(len(completions))]
"""


def prepared(folder, *overrides):
    """The config of a short run with these rewards."""
    config = config_in(folder, *SHORT, "checkpoint.every=0", *overrides)
    (folder.parent / "letters.py").write_text(FAILS_WHERE_BROKEN)
    return config


def test_a_resumed_run_repeats_the_failed_step(tmp_path):
    """After the reward is fixed, the result equals that of a run without a failure."""
    straight = straight_run(*SHORT, "checkpoint.every=0")
    config = prepared(tmp_path / "b")
    (tmp_path / "broken").touch()
    notes = Notes()
    with pytest.raises(RewardError) as caught:
        run_training(config, report=notes)
    line, parts = (
        str(caught.value),
        ('"letters" failed', "the judge does not answer", "--resume", "stop_if_all_fail"),
    )
    assert all(part in line for part in parts) and caught.value.exit_code == 2
    assert any(line.startswith("before the reward failed: saved") for line in notes.lines)
    assert not (tmp_path / "b" / "tiny" / "final").exists()
    (tmp_path / "broken").unlink()
    resumed = run_training(config, report=Quiet(), resume=True)
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)


def test_a_reward_that_fails_in_an_evaluation_leaves_what_was_learned(tmp_path):
    """The third call, in the evaluation after the first update, fails; the update is saved."""
    (tmp_path / "third.py").write_text(FAILS_AT_THE_THIRD_CALL)
    reward = [f"reward.functions=['{tmp_path}/third.py:fails']", "reward.on_error='raise'", "eval.every=1"]
    config, notes = config_in(tmp_path / "a", *SHORT, *reward, "checkpoint.every=0"), Notes()
    with pytest.raises(RewardError, match="not now"):
        run_training(config, report=notes)
    assert any("before the reward failed: saved" in line for line in notes.lines)


class Impatient(Killer):
    """Requests a stop while the run saves."""

    def _tick(self, what):
        if what == self.what:
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_stopped_while_it_saves_for_a_failed_reward_has_saved(tmp_path):
    """The signal ends the run after the checkpoint is saved."""
    config = prepared(tmp_path / "b")
    (tmp_path / "broken").touch()
    with pytest.raises(Stopped) as stopped:
        run_training(config, report=Impatient("saving", 1))
    assert stopped.value.begun and [*checkpoint_folders(tmp_path / "b" / "tiny")] == [2]


@pytest.mark.parametrize(("steps", "updates"), [("0 1 3 4", 5), ("1 2 3", None)])
def test_a_slow_call_ends_the_run_at_the_third_batch_step_in_a_row(tmp_path, steps, updates):
    """A single slow call gives no reward and a message; the run saves before it ends."""
    reward = [f"reward.functions=['{tmp_path}/letters.py:slow']", "reward.timeout=1.0", "optim.max_steps=5"]
    config, notes = prepared(tmp_path / "a", *reward), Notes()
    (tmp_path / "slow").write_text(steps)
    if updates:
        assert run_training(config, report=notes).updates == updates
    else:
        with pytest.raises(RewardError, match=r'"slow" timed out after 1 s; it failed for every completion'):
            run_training(config, report=notes)
        assert any(line.startswith("before the reward failed: saved") for line in notes.lines)
    assert notes.lines.count('reward "slow" timed out after 1 s') == len(steps.split()) - (not updates)
