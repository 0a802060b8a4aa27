"""The first signal drops the current step and saves, a second one ends the process. The swap limit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runners.checkpoints.run_folder import checkpoint_folders
from runners.errors import UserError
from runners.machine.signals import ASKED, Stopped, StopSignals
from runners.telemetry.report import Quiet
from runners.training import session
from runners.training.train import run_training
from tests.support.resuming import SHORT, Killer, config_in, outcome, straight_run
from tests.support.tiny_runs import Notes
from tests.support.tiny_states import same_bits

ROOT = Path(__file__).resolve().parents[3]


class Signals(Killer):
    """Sends this process a signal during a phase."""

    def __init__(self, number, what, count):
        """`number` is the signal's."""
        super().__init__(what, count)
        self.number = number

    def _tick(self, what):
        if what.startswith(self.what):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(self.number)


STOPS = {
    # name: settings, and signals with their counts since the last resume
    "in a rollout, after an update, in the last evaluation": (
        ["eval.every=1"],
        [(signal.SIGTERM, "sampling", 2), (signal.SIGHUP, "step", 1), (signal.SIGTERM, "evaluating", 1)],
    ),
    "inside an accumulation, and in its gradients": (
        ["optim.gradient_accumulation_steps=3"],
        [(signal.SIGINT, "sampling", 3), (signal.SIGTERM, "learning", 1)],
    ),
    "before updates of two rollouts, between them, and between those of one": (
        ["optim.num_iterations=2", "optim.minibatches=2", "optim.gradient_accumulation_steps=2"],
        [(signal.SIGINT, "learning", 1), (signal.SIGTERM, "step", 1), (signal.SIGINT, "step", 5)],
    ),
    "with quantized rollouts and late syncs": (
        ["rollout.quantization=affine-4", "optim.num_iterations=2", "loss.sync_every=2"],
        [(signal.SIGTERM, "step", 1), (signal.SIGINT, "step", 2)],
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_is_resumed_bit_for_bit(tmp_path, name):
    """The run is stopped several times, in different phases."""
    settings, signals = STOPS[name]
    settings = [*SHORT, "checkpoint.every=0", *settings]
    straight = straight_run(*settings)
    config = config_in(tmp_path / "b", *settings)
    for place, (number, what, count) in enumerate(signals):
        with pytest.raises(Stopped) as stopped:
            run_training(config, report=Signals(number, what, count), resume=place > 0)
        assert stopped.value.exit_code == 128 + number
    resumed = run_training(config, report=Quiet(), resume=True)
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)


def test_a_resume_repeats_no_evaluation(tmp_path):
    """An evaluation before training is saved when a signal arrives."""
    settings = [*SHORT, "checkpoint.every=0", "eval.at_start=true", "eval.samples=2", "answer.form=exact"]
    config = config_in(tmp_path / "b", *settings)
    with pytest.raises(Stopped):
        run_training(config, report=Signals(signal.SIGINT, "sampling", 1))
    resumed = run_training(config, report=Killer("evaluating", 2), resume=True)
    assert resumed.first_em is not None
    assert outcome(resumed.folder) == outcome(straight_run(*settings).folder)


def test_a_stop_before_the_first_evaluation_saves_nothing(tmp_path):
    """A resume starts over, with a message."""
    config = config_in(tmp_path / "b", *SHORT, "eval.at_start=true")
    with pytest.raises(Stopped) as stopped:
        run_training(config, report=Signals(signal.SIGINT, "evaluating", 1))
    assert stopped.value.begun
    notes = Notes()
    run_training(config, report=notes, resume=True)
    assert any(
        "contains no checkpoint yet: the run starts from the beginning" in line for line in notes.lines
    )


@pytest.mark.parametrize(("status", "begun"), [("loading the model", False), ("sampling", True)])
def test_a_stopped_start_over_is_continued_only_once_the_old_run_is_gone(tmp_path, status, begun):
    """Otherwise, a resume would continue the old run."""
    config = config_in(tmp_path / "b", *SHORT)
    old = run_training(config, report=Quiet()).folder
    with pytest.raises(Stopped) as stopped:
        run_training(config, report=Signals(signal.SIGINT, status, 1), overwrite=True)
    assert stopped.value.begun == begun != bool(checkpoint_folders(old))


@pytest.mark.parametrize("limit", [0, 2.5, 9])
def test_a_run_above_the_swap_limit_is_saved_and_can_be_resumed(limit, tmp_path, monkeypatch):
    """Swap used before the run does not count; unknown swap counts as 0."""
    readings = iter([5e9, 6e9, *[8e9] * 99])
    monkeypatch.setattr(session, "swap_used", lambda: next(readings))
    settings, notes = [*SHORT, "checkpoint.every=0"], Notes()
    config = config_in(tmp_path / "a", *settings, f"system.swap_limit_gb={limit}")
    if limit != 2.5:
        run_training(config, report=notes)
        return
    with pytest.raises(UserError, match=r"system\.swap_limit_gb: the system has swapped out 3\.00 GB"):
        run_training(config, report=notes)
    assert any(line.startswith("stopped before the system swaps more: saved") for line in notes.lines)
    monkeypatch.setattr(session, "swap_used", lambda: None)
    resumed = run_training(config, report=Quiet(), resume=True)
    straight = straight_run(*settings)
    assert same_bits(resumed.state, straight.state) and outcome(resumed.folder) == outcome(straight.folder)


TWICE = """
import os, signal, sys, threading, time
import mlx.core as mx
from runners.errors import UserError
from runners.machine.signals import Stopped, StopSignals, to_stderr
(name, _, asked), gap, computes = sys.argv[1].partition(" "), float(sys.argv[2]), sys.argv[3] == "True"
number = getattr(signal, name)
def send():
    for turn in range(2):
        time.sleep(gap)
        signals.ask(number) if asked and not turn else os.kill(os.getpid(), number)
def say(text):
    time.sleep(0 if computes else 0.6)  # as beside other ranks
    to_stderr(text)
with StopSignals(say) as signals:
    threading.Thread(target=send, daemon=True).start()
    try:
        a = mx.random.normal((1500, 1500))
        for _ in range(20000 if computes else 1):
            a = a @ a * 1e-3
        mx.eval(a)  # a long time, in which no Python handler runs
        time.sleep(60)
    except Stopped:
        time.sleep(2 * gap + 0.2)
        print("saved")
"""


@pytest.mark.parametrize(
    ("name", "gap", "ends"),
    [
        ("SIGINT", 1.5, True),
        ("SIGTERM", 0.05, False),
        ("SIGHUP", 0.6, False),
        ("SIGTERM asked", 0.6, False),
    ],
)
def test_a_second_signal_ends_at_once_even_within_mlx(name, gap, ends):
    """The first signal is answered with a message, the second ends the process even if MLX is computing.

    Repeated signals of a shell or a launcher do not count as a second one: at the same moment, a second
    hang-up, or the first signal to a rank that other ranks have asked to stop.
    """
    done = subprocess.run(
        [sys.executable, "-c", TWICE, name, str(gap), str(ends)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ASKED in done.stderr
    assert (done.returncode, done.stdout) == ((128 + getattr(signal, name), "") if ends else (0, "saved\n"))


BLOCKED = """
import os, signal, sys, threading, time
from runners.machine.signals import Stopped, StopSignals
def say(text):
    time.sleep(600)
with StopSignals(say) as signals:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except Stopped:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
"""


def test_a_second_signal_ends_a_run_whose_output_is_blocked():
    """This happens after Ctrl-S, or if a pager no longer reads."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", BLOCKED], env=environment, timeout=600)
    assert done.returncode == 128 + signal.SIGINT


def test_a_launcher_cannot_interrupt_the_end_of_a_rank():
    """SIGTERM is ignored after the block; without `ignore_launcher`, its old handler is restored."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with StopSignals():
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with StopSignals() as signals:
            signals.ignore_launcher()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
