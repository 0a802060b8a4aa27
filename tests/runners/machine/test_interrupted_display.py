"""Ctrl-C while the display is on: the screen stays in order, and says how to go on."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runners.machine.signals import ASKED
from tests.support.processes.terminal import CTRL_C, Session
from tests.support.tiny_runs import small

ROOT = Path(__file__).resolve().parents[3]
REWARD = """
import time
from pathlib import Path

def slow(completions, trainer_state, **_):
    (Path(__file__).parent / f"step-{{trainer_state.global_step}}").touch()
    waits = trainer_state.global_step >= 2
    while waits:
        try:
            time.sleep(0.002)
            waits = not Path({go!r}).exists()
        except BaseException:  # it catches the interrupt where it runs in the main thread
            pass
    return [float(n % 2) for n in range(len(completions))]
"""


@pytest.fixture
def start(tmp_path):
    """Starts a run on a terminal, whose reward waits in the third update until there is a file "go"."""

    def start_run(columns=70, settings=None):
        (tmp_path / "slow.py").write_text(REWARD.format(go=str(tmp_path / "go")))
        (tmp_path / "train.toml").write_text(
            small(
                run={"output_dir": str(tmp_path / "out put")},
                reward={"functions": ["slow.py:slow"], **(settings or {})},
                optim={"max_steps": 4},
            )
        )
        command = [sys.executable, "-m", "runners.cli", "run", str(tmp_path / "train.toml")]
        command += ["--set", "run.name=my-first"]
        return Session(command, columns, PYTHONPATH=str(ROOT), HOME=str(tmp_path))

    return start_run


def test_after_ctrl_c_whole_lines_are_left_and_the_command_that_goes_on(start, tmp_path):
    """Nothing of the current line; the command is run as it was printed, to the end."""
    with start() as session:
        session.read_until("update 2/4")
        session.type(CTRL_C)
        code, screen = session.finish()
    lines = [line for line in screen.lines if line]
    assert code == 130 and screen.cursor_shown, "\n".join(screen.lines)
    assert len([line for line in lines if re.match(r"update +2/4", line)]) == 1
    assert any(line.startswith("interrupted: saved") for line in lines)
    advice = screen.lines[screen.lines.index("interrupted") + 1 :]  # a long line, which the terminal wraps
    said, _, command = "".join(advice).partition(": ")
    assert said == "to continue"
    (tmp_path / "go").touch()
    program, *arguments = shlex.split(command)
    assert program == "python" and arguments[-1] == "--resume" and "run.name=my-first" in arguments
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stdout and "update 4/4" in done.stdout


def test_after_a_second_ctrl_c_the_prompt_is_below_all_lines(start, tmp_path):
    """The process ends at once, though a reward goes on; the cursor is back, on a line of its own."""
    with start(settings={"timeout": 0}) as session:
        session.read_until("update 2/4")
        while not (tmp_path / "step-2").exists():
            time.sleep(0.01)
        session.type(CTRL_C)
        session.read_until(ASKED)
        time.sleep(0.6)  # so soon it would be the same wish
        session.type(CTRL_C)
        code, screen = session.finish()
    assert code == 130 and screen.cursor_shown, "\n".join(screen.lines)
    assert screen.lines[-1] == ""
