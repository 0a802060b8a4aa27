"""`grpo check` shows prompts and rewards before a run, and warns of problems."""

import json

import pytest

from tests.support.commands import grpo
from tests.support.tiny_runs import small


def write_data(path, answers, **columns):
    """Writes rows with these answers."""
    rows = [{"question": f"What is {i}?", "answer": answer, **columns} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_a_good_config_has_nothing_to_warn_of():
    """The quickstart's output has the data, the first prompt with its nudge, and a row for each reward."""
    result = grpo("check", "quickstart")
    lines = result.stdout.splitlines()
    assert "4,000 problems to train on, 200 of 400 held out" in lines[0]
    assert any(line.startswith("  | <|user|>") and line.endswith("<reasoning>") for line in lines)
    rows = {line.split()[0]: line.split()[1:] for line in lines if "_reward_func" in line}
    assert rows["correctness_reward_func"] == ["2", "0", "0", "0", "0", "0"]
    assert rows["int_reward_func"] == ["0.5", "0.5", "0", "0", "0", "0"]  # the wrong answer is a number too
    assert "warning" not in result.stdout


def test_rewards_that_cannot_tell_are_pointed_out(tmp_path):
    """Rewards that are constant, absent, failing, or higher for wrong answers cause warnings."""
    write_data(tmp_path / "d.jsonl", range(20))
    (tmp_path / "mine.py").write_text(
        "def constant(completions, **_): return [0.25] * len(completions)\n"
        "def silent(completions, **_): return [None] * len(completions)\n"
        "def broken(completions, **_): raise RuntimeError('oh')\n"
        "def likes_nothing(completions, **_): return [-len(c[0]['content']) for c in completions]\n"
    )
    (tmp_path / "t.toml").write_text(
        '[model]\npath = "embedded"\n[data]\nsource = "d.jsonl"\n[answer]\nform = "xml"\n[reward]\n'
        'functions = ["mine.py:constant", "mine.py:silent", "mine.py:broken", "mine.py:likes_nothing"]\n'
    )
    result = grpo("check", "t.toml", "--problems", "3")
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    text = "\n".join(warnings)
    assert "\nwarning: constant returned 0.25 for every answer, good or bad" in text
    assert "silent returned no reward for any answer" in text
    assert 'reward "broken" failed' in text and "RuntimeError: oh (reference answer)" in text
    assert "not above the total reward of: answer without form, form without answer" in text
    assert "likes_nothing returned" not in text
    free = grpo("check", "t.toml", "--set", "answer.form=none").stdout  # nothing says that one text is better
    assert "  reference answer  wrong answer  empty\n" in free and "silent returned no reward" in free
    assert "constant returned" not in free and "the reference answer" not in free


def test_a_sample_shows_what_the_model_writes_what_is_read_and_each_reward(tmp_path):
    """A completion has the reward of a right answer only if its answer is read as right."""
    shown = grpo("check", "quickstart", "--sample", "6", "--set", "rollout.temperature=0.01")
    parts = shown.stdout.split("\ncompletion ")[1:]
    assert len(parts) == 6 and all("\n  + <reasoning>" in part for part in parts)
    verdicts = []
    for part in parts:
        (line,) = [line for line in part.splitlines() if line.startswith("  read as the answer  ")]
        (reward,) = [line.split()[-1] for line in part.splitlines() if "correctness_reward_func" in line]
        verdicts.append("(right)" in line)
        assert (reward == "2") is verdicts[-1], part
    assert any(verdicts), "the shipped model solves some of its problems"


def test_a_nudge_that_opens_thoughts_is_closed_before_the_answer(tmp_path):
    """Otherwise, no answer would be right."""
    write_data(tmp_path / "d.jsonl", range(20))
    data = {"source": "d.jsonl", "nudge": "<think>"}
    (tmp_path / "t.toml").write_text(small(data=data, answer={"form": "exact"}))
    shown = grpo("check", "t.toml").stdout
    assert [line.split()[1:] for line in shown.splitlines() if "correctness" in line] == [["2", "0", "0"]]


@pytest.mark.parametrize("form", ["last_number", "boxed", "gsm8k", "exact", "regex:is ([0-9]+)", "none"])
def test_a_right_completion_has_the_form_of_the_task(tmp_path, form):
    """The built-in reward prefers it; a custom reward that ignores answers causes no warning."""
    write_data(tmp_path / "d.jsonl", range(20))
    own = "def long(completions, **_): return [float(len(c[0]['content'])) for c in completions]\n"
    (tmp_path / "mine.py").write_text(own)
    functions = [*(["correctness_reward_func"] * (form != "none")), "mine.py:long"]
    (tmp_path / "t.toml").write_text(
        small(data={"source": "d.jsonl"}, answer={"form": form}, reward={"functions": functions})
    )
    shown = grpo("check", "t.toml").stdout
    assert "warning: " not in shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith("  ")}
    assert form.startswith(("none", "regex")) or rows["correctness_reward_func"][:2] == ["2", "0"]


@pytest.mark.parametrize(
    ("answers", "rewards", "warned"),
    [
        (["28 €", "7"], ["correctness_reward_func", "int_reward_func"], "int_reward_func"),
        (["28", "7"], ["correctness_reward_func", "int_reward_func"], ""),
        (["9", "28"], ["correctness_reward_func", "mine.py:long"], ""),
        (["9", "28"], ["correctness_reward_func", "mine.py:least"], "least"),
    ],
)  # fmt: skip
def test_a_reward_that_prefers_a_wrong_answer_is_named(tmp_path, answers, rewards, warned):
    """The warning shows the first such answer; a custom reward must prefer all of them."""
    write_data(tmp_path / "d.jsonl", answers * 4)
    (tmp_path / "mine.py").write_text(
        "import re\n"
        "def long(completions, **_): return [float(len(c[0]['content'])) for c in completions]\n"
        "def number(text): return sum(map(int, re.findall('[0-9]+', text)))\n"
        "def least(completions, **_): return [.001 * number(c[0]['content']) for c in completions]\n"
    )
    text = small(data={"source": "d.jsonl", "eval_split": "train"}, reward={"functions": rewards})
    (tmp_path / "t.toml").write_text(text)
    shown = grpo("check", "t.toml").stdout
    line = f'warning: {warned} returned less for the reference answer "{answers[0]}" than for a wrong one\n'
    assert (line in shown) is bool(warned) and ("warning: " in shown) is bool(warned)


@pytest.mark.parametrize(
    ("row", "table"),
    [
        ({"question": "Name a sea."}, "  prompt's words  one sentence  empty\n"),
        ({"question": "f?", "answer": ["assert f(1) == 1"]}, "no correct completion is known; --sample 4 "),
    ],
)
def test_what_has_no_right_completion_is_not_scored_as_one(tmp_path, row, table):
    """Prompts alone have neutral texts, program tests have no completion, and failures are reported."""
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    (tmp_path / "mine.py").write_text("def reward(prompts, **_): return [0.0] * len(prompts)\n")
    (tmp_path / "bad.py").write_text("def broken(completions, **_): raise RuntimeError('oh')\n")
    functions = ["mine.py:reward", "bad.py:broken"]
    form = {"form": "code"} if "answer" in row else {}
    data = {"source": "d.jsonl", "eval_split": "train"}
    (tmp_path / "t.toml").write_text(small(data=data, answer=form, reward={"functions": functions}))
    shown = grpo("check", "t.toml").stdout
    assert table in shown and "RuntimeError: oh (one sentence)" in shown, shown
    assert "gold" not in shown and "wrong" not in shown and "reward returned" not in shown
    real = grpo("check", "t.toml", "--sample", "2", "--set", "rollout.max_new_tokens=4").stdout
    assert "--sample" not in real and real.count("  reward  0\n  broken  none\n") == 2
    assert "warning: 2 of 2 completions are cut off" in real


ENVIRONMENT = """
class Guess:
    def reset(self, **row):
        '''Begin.'''

    def get_reward(self):
        return 0.0


class Raises(Guess):
    def reset(self, **row):
        raise RuntimeError("no server at localhost:1")


class Picky(Guess):
    def reset(self, city):
        '''Begin.'''
"""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Raises", "the environment: reset: RuntimeError: no server at localhost:1"),
        ("Picky", "its signature is reset(city), but it is called with the data's columns question, answer"),
    ],
)
def test_what_is_wrong_with_an_environment_is_a_line(tmp_path, name, line):
    """One warning names the environment; the rest of the output is complete."""
    write_data(tmp_path / "rows.jsonl", ["12"] * 8)
    (tmp_path / "guess.py").write_text(ENVIRONMENT)
    keys = {"reward": {"functions": []}, "data": {"source": "rows.jsonl", "nudge": ""}}
    (tmp_path / "t.toml").write_text(small(env={"factory": f"guess.py:{name}"}, **keys))
    result = grpo("check", "t.toml")
    warnings = [each for each in result.stdout.splitlines() if each.startswith("warning: ")]
    assert len([each for each in warnings if line in each]) == 1, result.stdout
    assert "prompt tokens" in result.stdout
    if name == "Picky":
        assert line in grpo("run", "t.toml", code=2).stderr
    assert (
        "did you mean Guess?" in grpo("check", "t.toml", "--set", "env.factory=guess.py:Gues", code=2).stderr
    )
