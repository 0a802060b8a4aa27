"""If standard output fails or the terminal closes, commands end with one line, and a run saves first."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runners import cli
from runners.machine.signals import Stopped, StopSignals
from tests.support.processes.terminal import Session

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
run = {name = "r", output_dir = "out"}
model.path = "embedded"
data = {source = "rows.jsonl", system_prompt = ""}
rollout = {num_generations = 2, max_new_tokens = 4, launch = "eval", check_every = 4, max_batch = 8}
optim = {batch_size = 2, max_steps = 1000}
eval = {samples = 2, at_start = false}
"""
COMMANDS = {
    "generate": ["generate", "embedded", "hello", "--max-tokens", "2"],
    "chat": ["chat", "embedded", "--max-tokens", "2"],
    "run": ["run", "train.toml"],
    "eval": ["eval", "embedded", "--config", "train.toml", "--max-tokens", "2"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A fresh current folder with a config and its data."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f'{{"question": "{i}?", "answer": "{i}"}}\n' for i in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "train.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_under_standard_output_is_a_line(place, command, monkeypatch, capsys):
    """Every command exits with code 2 and prints the line last."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            cli.main(COMMANDS[command])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and lines[-1] == "standard output: No space left on device", lines


def test_a_run_whose_reader_closes_the_pipe_saves_and_says_so(place):
    """`grpo run … | head` exits with code 141, writes one line to standard error, and saves a checkpoint."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runners.cli", "run", "train.toml"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    while not process.stdout.readline().startswith("update"):
        assert process.poll() is None
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(600) == 141
    lines = [line for line in error.splitlines() if "BLAS" not in line]
    assert lines[0] == "standard output: Broken pipe: the run ends"
    assert lines[-1].startswith(("interrupted: saved out/r/checkpoint-", "saved out/r/checkpoint-"))
    assert "Traceback" not in error and "Exception" not in error
    assert list(Path("out/r").glob("checkpoint-*"))


def test_a_run_whose_terminal_closes_saves(place):
    """After SIGHUP and failing writes, the run exits with code 129 and without a traceback."""
    command = f"exec {sys.executable} -m runners.cli run train.toml 2>errors"
    with Session(["sh", "-c", command], 80, PYTHONPATH=str(ROOT)) as session:
        session.read_until("tok/s")
        assert session.hang_up() == 128 + signal.SIGHUP
    assert "Traceback" not in Path("errors").read_text() and list(Path("out/r").glob("checkpoint-*"))


def test_a_hangup_that_nohup_ignores_stays_ignored():
    """`nohup grpo run …` continues after its terminal has closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals.stopped and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
            assert signals.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)
    assert Stopped(signal.SIGHUP).exit_code == 129
