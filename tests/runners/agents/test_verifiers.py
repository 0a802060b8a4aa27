"""Tasksets of verifiers, whose own client renders chats and reads tokens, against the same completions of a
run without them."""

import shutil
from pathlib import Path

import pytest

from benchmarks import evidence
from tests.support.tiny_runs import PROBLEMS, ran, small

pytest.importorskip("verifiers.v1")
pytest.importorskip("uvicorn")
TASKS_FILE = Path(evidence.__file__).with_name("clients") / "verifiers_tasks.py"
ROLLOUT = {"num_generations": 6, "max_new_tokens": 40, "temperature": 1.0}
TASKS = 24
RIGHT = """
def right(completions, answer, **_):
    said = [each[-1]["content"].rpartition("<answer>")[2] for each in completions]
    said = [text.partition("</answer>")[0].strip() for text in said]
    return [float(text == gold.rpartition("#### ")[2]) for text, gold in zip(said, answer)]
"""


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """Some of the embedded problems, in a file, and the taskset beside the config."""
    file = tmp_path / "problems.jsonl"
    lines = (PROBLEMS / "train.jsonl").read_text(encoding="utf-8").splitlines()[:TASKS]
    file.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("PROBLEMS", str(file))
    shutil.copy(TASKS_FILE, tmp_path)
    (tmp_path / "own.py").write_text(RIGHT)
    return file


def test_taskset_trains_as_completions_do(tmp_path, problems):
    """The rows, masks, rewards and gradients of a taskset are those of the run without it, bit for bit."""
    kept = {"answer": {"form": "none"}, "rollout": ROLLOUT}
    splits = {"split": "train", "eval_split": "train"}
    data = {"source": str(problems), **splits, "nudge": "", "system_prompt": ""}
    plain = small(data=data, reward={"functions": ["own.py:right"]}, **kept)
    without = ran(tmp_path, text=plain)
    env = {"taskset": "verifiers:verifiers_tasks", "program": [], "timeout": 300.0}
    found = ran(tmp_path, text=small(env=env, data={"source": ""}, **kept).replace('source = ""', ""))
    for one, other in zip(without.updates, found.updates, strict=True):
        assert one["grad_norm"] == other["grad_norm"] and one["reward"] == other["reward"]
    assert any(each["grad_norm"] for each in found.updates)
    weights = [(run.result.folder / "final/model.safetensors").read_bytes() for run in (without, found)]
    assert weights[0] == weights[1]
