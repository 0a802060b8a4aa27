"""README's config with a real model in a terminal: something moves all the time, and Ctrl-C ends it at once.

`GRPO_REAL_MODEL=FOLDER python -m pytest tests/campaigns/test_first_hour.py -s`, on an idle machine; else
nothing runs.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import attrs
import pytest

from tests.support.processes.terminal import CTRL_C, Session
from tests.support.tiny_runs import PROBLEMS

ROOT = Path(__file__).resolve().parents[2]
MODEL = os.environ.get("GRPO_REAL_MODEL", "")
FIRST, GAP, END = 5.0, 2.0, 2.0  # seconds to the first output, between two changes, from Ctrl-C to the end
MOMENTS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 65, 85, 110]

pytestmark = pytest.mark.skipif(not MODEL, reason="wants GRPO_REAL_MODEL, the folder of a real model")


@attrs.frozen
class Walk:
    """What a terminal saw of a command."""

    times: list[float]  # of each change, seconds from its start
    text: str
    ended: float | None  # seconds from Ctrl-C to the end; None: it was not sent
    code: int


def readme_config(folder: Path) -> Path:
    """README's first config, with the model and the problems of this test."""
    found = re.search(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("Qwen/Qwen2.5-0.5B-Instruct", MODEL)
    text = text.replace("problems.jsonl", str(PROBLEMS / "train.jsonl"))
    text = text.replace("[run]\n", f'[run]\noutput_dir = "{folder / "out"}"\n')
    (folder / "train.toml").write_text(text)
    return folder / "train.toml"


def walk(columns: int, *words: str, stop: float) -> Walk:
    """Runs `grpo-run` in a terminal of so many columns, with Ctrl-C after `stop` seconds."""
    start, times, sent = time.monotonic(), [], None
    with Session([sys.executable, "-m", "runners.cli", "run", *words], columns) as session:
        while session.child.poll() is None:
            if session.read(0.05):
                times.append(time.monotonic() - start)
            now = time.monotonic() - start
            if sent is None and now > stop:
                session.type(CTRL_C)
                sent = now
            assert now < stop + 60, session.output[-2000:]
        ended = None if sent is None else time.monotonic() - start - sent
        session.read_until()
        return Walk(times, session.output, ended, session.child.wait())


@pytest.mark.parametrize("columns", [120, 60])
def test_something_moves_all_the_time(tmp_path, columns):
    """From the command until after the first update."""
    seen = walk(columns, str(readme_config(tmp_path)), stop=90.0)
    before = [moment for moment in seen.times if moment < 90.0]
    gaps = sorted(((b - a, a) for a, b in zip(before, [*before[1:], 90.0], strict=True)), reverse=True)
    print(f"\n{columns} columns: first after {before[0]:.1f} s; the longest gaps (s, after): {gaps[:4]}")
    assert before[0] <= FIRST
    assert gaps[0][0] <= GAP
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.text).replace("\r", "\n")
    assert max(len(line) for line in text.split("\n") if line.startswith("update ")) <= columns


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_it_at_any_moment(tmp_path, moment):
    """The command says how to continue."""
    seen = walk(100, str(readme_config(tmp_path)), stop=moment)
    assert seen.ended is not None
    print(f"\nCtrl-C after {moment} s: ended {seen.ended:.2f} s later with {seen.code}")
    assert seen.ended <= END
    assert seen.code in (130, -signal.SIGINT)
    assert "Traceback" not in seen.text


def test_a_resume_repeats_no_evaluation(tmp_path):
    """The evaluation before training is saved as soon as it is done."""
    config = str(readme_config(tmp_path))
    settings = ["--set", "eval.samples=8", "--set", "eval.max_new_tokens=16"]
    first = walk(100, config, *settings, stop=40.0)
    second = walk(100, config, *settings, "--resume", stop=40.0)
    assert "eval before training" in first.text
    assert "eval before training" not in second.text
