"""`answer.form = "code"`: a program is right if it passes its tests."""

import json
from typing import Any

import pytest

from runners.answers.forms import answer_form
from runners.config.loading import load_config
from runners.data.datasets import load_rows, with_answers_of
from runners.errors import UserError
from runners.rewards.builtin import built_in
from runners.rewards.calls import RewardLog
from runners.sandbox import sandbox
from runners.sandbox.sandbox import check_sandbox

try:
    check_sandbox()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

FORM: Any = answer_form("code")
TESTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
HALF = "```python\ndef add(a, b):\n    return 0\n```"


@pytest.mark.parametrize(
    ("text", "score"), [(RIGHT, 1.0), (HALF, 0.5), ("I cannot.", 0.0), ("```python\nx", 0.0)]
)
def test_the_reward_is_the_share_of_tests_and_right_is_all_of_them(text, score):
    completion = [{"role": "assistant", "content": text}]
    reward = built_in(FORM)["correctness_reward_func"]
    assert reward([completion, completion], answer=[TESTS, None]) == [2 * score, None]
    assert FORM.is_right(text, TESTS) is (score == 1.0)


def test_programs_that_a_limit_ends_are_counted():
    """The metric counts ended programs among those with tests."""
    log = RewardLog(4)
    texts = [RIGHT, "```python\nwhile True: pass\n```", HALF, RIGHT]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    reward = built_in(answer_form("code", program_seconds=1))["correctness_reward_func"]
    values = reward(completions, answer=[TESTS] * 3 + [None], log_metric=log.log_metric)
    assert values == [2.0, 0.0, 1.0, None]
    assert log.metrics == {"programs/ended": [0.0, 1.0, 0.0]}


@pytest.mark.parametrize(("seconds", "score"), [(1, 0.0), (3, 1.0)])
def test_the_config_limits_processor_time(tmp_path, seconds, score):
    row = {"question": "Compute.", "answer": ["assert spent > 1.5"]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    settings = ["model.path=embedded", f"data.source={tmp_path / 'rows.jsonl'}", "answer.form=code"]
    form = load_config(None, [*settings, f"answer.program_seconds={seconds}"]).answer_form
    code = "import time\nwhile time.process_time() < 1.6: pass\nspent = time.process_time()"
    assert form is not None and form.scores([code], [json.dumps(row["answer"])]) == [score]


def test_a_missing_program_passes_no_test():
    """A missing program fails even tests that an empty program would pass."""
    assert FORM.scores([FORM.read(text) for text in ("", "I cannot.")], ["assert True"] * 2) == [0.0, 0.0]


def test_tests_may_be_a_list_in_the_data_and_answer_no_other_form(tmp_path):
    row = {"question": "Write add(a, b).", "answer": json.loads(TESTS)}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    settings = ["model.path=embedded", f"data.source={tmp_path / 'rows.jsonl'}"]
    config, other = (load_config(None, [*settings, f"answer.form={form}"]) for form in ("code", "boxed"))
    rows, _ = load_rows(config.check().data)
    assert with_answers_of(config, rows).data.answer == "answer"
    assert config.reward.functions == ("correctness_reward_func",)
    assert "```python" in config.data.system_prompt
    with pytest.raises(UserError, match="tests for programs"):
        with_answers_of(other, rows)


def test_a_partial_sandbox_needs_its_key(tmp_path, monkeypatch):
    """The key is required before a model is loaded and for scoring."""
    monkeypatch.setattr(sandbox, "_missing", lambda: ["namespaces (no)"])
    row = {"question": "Write add(a, b).", "answer": json.loads(TESTS)}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    settings = ["model.path=embedded", f"data.source={tmp_path / 'rows.jsonl'}", "answer.form=code"]
    strict, lax = (load_config(None, [*settings, *more]) for more in ([], ["answer.partial_sandbox=true"]))
    rows, _ = load_rows(strict.check().data)
    with pytest.raises(UserError, match=r"lacks namespaces \(no\)"):
        with_answers_of(strict, rows)
    form = with_answers_of(lax, rows).answer_form
    assert form is not None and form.scores([form.read(RIGHT)], [TESTS]) == [1.0]
    with pytest.raises(UserError, match="lacks namespaces"):
        FORM.scores([FORM.read(RIGHT)], [TESTS])


def test_programs_that_can_forge_their_tests_are_counted():
    forged = RIGHT.replace("return", "import builtins, sys; sys._getframe(); return")
    assert FORM.doubts([RIGHT, HALF]) == []
    assert FORM.doubts([RIGHT, forged, forged]) == [
        "2 of 3 completions contain _getframe, builtins, with which a program can pass tests without "
        "solving them: check the completions that count as right"
    ]
    other: Any = answer_form("boxed")
    assert other.doubts([forged]) == []
