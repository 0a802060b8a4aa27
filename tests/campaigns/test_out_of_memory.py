"""In a memory cgroup, the kernel kills a child of each command: the command ends with a message."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small

ROOT = Path(__file__).resolve().parents[2]
MOUNTS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
KILLS = {"memory.limit_in_bytes": "memory.oom_control", "memory.max": "memory.events"}
# Once a run; the second process of rewards is left alone.
GREEDY = """
import pathlib

def greedy(completions, **_):
    mark = pathlib.Path(__file__).with_name("held")
    if not mark.exists():
        mark.touch()
        held = b"x" * 4_000_000_000
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
RESTARTED = "process was restarted and reloaded its files"
TEMPLATE = "its tokenizer or chat template needs more than"
PATIENCE = 20.0  # seconds
GROWING = (
    "{% set n = namespace(x='xx') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
)
SANDBOX = """
from runners.sandbox.code_tests import judge_program
from runners.sandbox.sandbox import Limits
tests = ["assert f(1) == 2"]
held = "held = bytes(1) * 450_000_000\\ndef f(n): return n + 1"
print(judge_program(held, tests, Limits(memory=10**9)))
print(judge_program("def f(n): return n + 1", tests).passed)
"""


@contextlib.contextmanager
def memory_group(size: int) -> Iterator[tuple[Path, Path]]:
    """A cgroup below this process's own that holds `size` bytes, and the file that counts its kills."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    own = re.findall(r"^\d+:(?:memory)?:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    limits = [
        Path(f"{mount}{path}/grpo-memory-{os.getpid()}") / limit
        for mount, limit in MOUNTS.items()
        for path in own
    ]
    for limit in limits:
        with contextlib.suppress(OSError):
            limit.parent.mkdir()
            break
    else:
        pytest.skip("no memory cgroup can be made here")
    group = limit.parent
    try:
        if not limit.exists():
            pytest.skip("this cgroup limits no memory")
        limit.write_text(str(size))
        yield group, group / KILLS[limit.name]
    finally:
        # A child that still imports has not seen yet that its pipe is closed.
        ends = time.monotonic() + PATIENCE
        while (left := (group / "cgroup.procs").read_text().split()) and time.monotonic() < ends:
            time.sleep(0.1)
        for process in left:
            os.kill(int(process), 9)
        for _ in range(100):  # until the last of its processes is gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            subprocess.run(["sleep", "0.1"], check=False)
        assert not left, "processes were left"


def said_within(megabytes: int, folder: Path, *words: object) -> tuple[int, str]:
    """The exit code and the text of a Python with these words, of which one child was killed."""
    with memory_group(megabytes * 1_000_000) as (group, kills):
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "GRPO_FN_CACHE": str(folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
        assert re.search(r"^oom_kill [1-9]", kills.read_text(), re.MULTILINE), done.stdout
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout


@pytest.mark.parametrize("command", ["run", "check", "difficulty"])
def test_the_process_of_rewards(tmp_path, command):
    """It is restarted, or nothing is left to do; a message says so."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    place = {"name": "r", "output_dir": str(tmp_path)}
    (tmp_path / "train.toml").write_text(small(run=place, reward={"functions": ["greedy.py:greedy"]}))
    more = {"run": [], "check": ["--problems", "2"], "difficulty": ["--samples", "2", "--out", "d.jsonl"]}
    code, text = said_within(2500, tmp_path, "-m", "runners.cli", command, "train.toml", *more[command])
    assert code == (2 if command == "difficulty" else 0), text
    assert RESTARTED in text or "its process ended" in text, text
    assert command != "run" or (tmp_path / "r/final").is_dir()


@pytest.mark.parametrize("words", ["init model rows.jsonl --out t.toml", "export model --out e"])
def test_the_process_that_tries_a_template(tmp_path, words):
    folder = make_model_folder(tmp_path / "model", layers=1)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": GROWING}))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 8)
    # The kernel takes the largest process. Libraries that are installed decide how large the command is.
    for megabytes in range(400, 800, 50):
        code, text = said_within(megabytes, tmp_path, "-m", "runners.cli", *words.split())
        if code != -signal.SIGKILL:
            break
    assert code == 2 and TEMPLATE in text, text


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_command_itself(tmp_path, command):
    """Its target does not exist, and the command can be repeated."""
    make_model_folder(tmp_path / "model", hidden_size=1024, intermediate_size=4096, layers=10)
    words = ["-m", "runners.cli", command, "model", "--out", "new"]
    code, _ = said_within(250, tmp_path, *words)
    assert code == -signal.SIGKILL and not (tmp_path / "new").exists()
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {each.name for each in tmp_path.iterdir()} - {"cache"} == {"model", "new"}


def test_a_program_in_the_sandbox(tmp_path):
    """It counts as ended by a limit; the next program runs."""
    code, text = said_within(300, tmp_path, "-c", SANDBOX)
    assert code == 0 and text.splitlines() == ["Verdict(passed=[False], ended=True)", "[True]"], text
