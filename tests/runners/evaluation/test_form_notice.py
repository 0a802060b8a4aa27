"""The notice about completions without an answer or cut off, and a run without reference answers."""

import json
import re
from typing import Any

import pytest

from runners.answers.forms import answer_form
from runners.config.loading import load_config
from runners.data.prompts import Example
from runners.evaluation.completions import Completion, Evaluator
from runners.inference.text_generation import LENGTH
from runners.training.train import run_training
from tests.support.tiny_runs import Notes, small

RIGHT = "<answer>18</answer>"
PROSE = ["The answer is 18 dollars."] * 9


@pytest.mark.parametrize(
    ("form", "texts", "cut", "line"),
    [
        ("xml", [*PROSE, RIGHT], 0, r'9 of 10 .* lack <answer>…</answer>, .*10 fit .*"last_number", 10 of'),
        ("boxed", ["no"] * 10, 0, r"10 of 10 .* lack \\boxed{…}, .*data.system_prompt or data.nudge"),
        ("xml", [*PROSE, "x"], 9, r"9 of 10 .* cut off at 64 tokens; .* up to 5: .*max_new_tokens, .* 128"),
        *(("xml", [*PROSE[1:], RIGHT, RIGHT], 0, None), ("xml", [], 0, None)),
    ],
)
def test_a_notice_requires_nine_in_ten_completions(form, texts, cut, line):
    """The notice suggests a form or a length if nine in ten completions need it."""
    read: Any = answer_form(form)
    nothing: Any = None
    same: dict[str, Any] = {"right": None, "rewards": {}, "reward": None}
    ends = [(64, LENGTH)] * cut + [(5, "stop")] * (len(texts) - cut)
    completions = [
        Completion(text=text, answer=read.read(text), tokens=tokens, finish=finish, **same)
        for text, (tokens, finish) in zip(texts, ends, strict=True)
    ]
    evaluator = Evaluator(engine=nothing, scorer=None, form=read, decoder=nothing, nudge="")
    examples = [Example((), "", (), "18", {})] * len(texts)
    found = evaluator.notice(completions, examples, 64)
    assert re.match(line, found) if line else found == ""


def test_a_run_without_reference_answers(tmp_path, monkeypatch):
    """Without exact match, the reward on held-out prompts stops the run and ranks checkpoints."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n}."} for n in range(20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text("def one(completions, **_):\n    return [1.0] * len(completions)\n")
    text = small(
        data={"source": "p.jsonl", "prompt": "prompt", "eval_split": "train"},
        reward={"functions": ["mine.py:one"]},
        eval={"every": 1, "samples": 2},
        optim={"max_steps": 5},
        checkpoint={"every": 1},
        stop={"when": ["eval/reward >= 1 for 2"]},
    )
    (tmp_path / "t.toml").write_text(text)
    config, shown = load_config("t.toml"), Notes()
    result = run_training(config, report=shown)
    log = [json.loads(line) for line in (result.folder / "training_log.jsonl").read_text().splitlines()]
    assert result.updates < 5 and result.last_em is None and not any("em" in line for line in log)
    assert [line["eval/reward"] for line in log if "time/eval" in line][-1] == 1.0
    state = json.loads(max(result.folder.glob("checkpoint-*")).joinpath("trainer_state.json").read_text())
    assert (state["em"], state["eval_reward"]) == (None, 1.0)
    kept = [json.loads(line) for line in (result.folder / "evaluations.jsonl").read_text().splitlines()]
    assert kept[0]["rewards"] == {"one": 1.0} and not {"answer", "correct"} & kept[0].keys()
