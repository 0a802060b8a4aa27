"""Ctrl-C while the display is on: the screen stays in order, and says how to go on."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.processes.terminal import CTRL_C, Session
from tests.support.tiny_runs import small

ROOT = Path(__file__).resolve().parents[3]
REWARD = """
import time
from pathlib import Path

def slow(completions, trainer_state, **_):
    waits = trainer_state.global_step >= 2
    while waits:
        try:
            time.sleep(0.002)
            waits = not Path({go!r}).exists()
        except BaseException:  # it catches the interrupt where it runs in the main thread
            pass
    return [float(n % 2) for n in range(len(completions))]
"""


def test_after_ctrl_c_whole_lines_are_left_and_the_command_that_goes_on(tmp_path):
    """Nothing of the current line; the command is run as it was printed, to the end."""
    (tmp_path / "slow.py").write_text(REWARD.format(go=str(tmp_path / "go")))
    (tmp_path / "train.toml").write_text(
        small(
            run={"output_dir": str(tmp_path / "out put")},
            reward={"functions": ["slow.py:slow"]},
            optim={"max_steps": 4},
        )
    )
    command = [sys.executable, "-m", "runners.cli", "run", str(tmp_path / "train.toml")]
    command += ["--set", "run.name=my-first"]
    with Session(command, 70, PYTHONPATH=str(ROOT), HOME=str(tmp_path)) as session:
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
