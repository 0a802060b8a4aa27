"""After Ctrl-C, the display leaves whole lines and shows how to continue the run."""

import re
import sys
from pathlib import Path

from tests.support.processes.terminal import CTRL_C, Session
from tests.support.tiny_runs import small

ROOT = Path(__file__).resolve().parents[3]
REWARD = """
import time

def slow(completions, trainer_state, **_):
    while trainer_state.global_step >= 2:
        try:
            time.sleep(0.002)
        except BaseException:  # it catches the interrupt where it runs in the main thread
            pass
    return [float(n % 2) for n in range(len(completions))]
"""


def test_after_ctrl_c_whole_lines_are_left_and_the_command_that_goes_on(tmp_path):
    """The unfinished live line is removed from the screen."""
    (tmp_path / "slow.py").write_text(REWARD)
    run, reward = {"output_dir": str(tmp_path / "out")}, {"functions": ["slow.py:slow"]}
    (tmp_path / "train.toml").write_text(small(run=run, reward=reward, optim={"max_steps": 4}))
    command = [sys.executable, "-m", "runners.cli", "run", str(tmp_path / "train.toml")]
    with Session(command, 70, PYTHONPATH=str(ROOT), HOME=str(tmp_path)) as session:
        session.read_until("update 2/4")
        session.type(CTRL_C)
        code, screen = session.finish()
    lines = [line for line in screen.lines if line]
    assert code == 130 and screen.cursor_shown, "\n".join(screen.lines)
    assert len([line for line in lines if re.match(r"update +2/4", line)]) == 1
    assert any(line.startswith("interrupted: saved") for line in lines)
    advice = screen.lines[screen.lines.index("interrupted") + 1 :]  # a long line, which the terminal wraps
    assert re.fullmatch(r"to continue: python .*train\.toml --resume", "".join(advice))
