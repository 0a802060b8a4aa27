"""The tasks of docs/your-task.md: each config trains, and each reward tells right from wrong completions."""

import importlib
import json
import sys
import types
from typing import Any

import pytest

from runners.config.loading import load_config
from runners.data.datasets import load_rows
from runners.errors import UserError
from runners.rewards.scoring import Scorer, resolve_rewards
from runners.training.train import run_training
from tests.support.pages import ROOT, snippets
from tests.support.tiny_runs import Notes

PAGE = [*snippets(ROOT / "docs" / "your-task.md")]
TASKS = {snippet.comments["task"]: snippet.text for snippet in PAGE if "task" in snippet.comments}
# Of each page's first row: a right completion and its reward, and others from better to worse.
SCORED = {
    "json": [
        ('```json\n{"name": "Ana", "item": "tea", "count": 2}\n```', 1.0),
        ('{"name": "Ana", "item": "coffee", "count": 2}', 0.8),
        *(('{"name": "Ana", "item": "tea", "count": 2, "by": "Friday"}', 0.8), ('{"name": "Ana"}', 0.4)),
        *(("[]", 0.1), ("tea for Ana", 0.0)),
    ],
    "choice": [("4 and 6 are even. The answer is C.", 2.0), ("B", 0.0), ("seven", 0.0)],
    "label": [(" Good. ", 0.5), ("bad", 0.0), ("very good", -0.5)],
    "constraints": [("Wide and blue and loud.", 1.0), ("Wide, blue.", 0.5), ("", 0.0)],
}
SMALL = (
    *("rollout.max_new_tokens=4", "rollout.num_generations=2", "optim.max_steps=1", "eval.samples=1"),
    *("data.max_prompt_length=2048", "optim.batch_size=1", "checkpoint.every=0"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the page's files."""
    monkeypatch.chdir(tmp_path)
    for snippet in PAGE:
        if "file" in snippet.comments:
            (tmp_path / snippet.comments["file"]).write_text(snippet.text, encoding="utf-8")
    for name, text in TASKS.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def gym(monkeypatch):
    """reasoning-gym, or a replacement: sums with one setting, and a score that may be 0.5."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        pass

    def create_dataset(name, *, max_terms=6, max_digits=4, seed, size):
        assert max_terms > 1, "max_terms must be > 1"
        for number in range(seed, seed + size):
            a, b = number % 50, number // 50 % 50
            meta = {"source_dataset": name, "source_index": number - seed}
            yield {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": meta}

    def get_score_answer_fn(name):
        return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.5 * (entry["answer"] in answer)

    made: Any = types.ModuleType("reasoning_gym")
    factory: Any = types.ModuleType("reasoning_gym.factory")
    made.get_score_answer_fn = get_score_answer_fn
    factory.DATASETS, factory.create_dataset = {"chain_sum": ()}, create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    return None


@pytest.mark.parametrize("name", sorted(SCORED))
def test_a_config_of_the_page_has_its_rewards_and_trains(folder, name):
    """A correct completion scores highest, faults cost what the page says; exact match requires a form."""
    config = load_config(f"{name}.toml").check()
    texts, wanted = zip(*SCORED[name], strict=True)
    row = load_rows(config.data, [folder])[0][0]
    columns = {column: [value] * len(texts) for column, value in row.items()}
    rewards = resolve_rewards(config.reward.functions, (), [folder], form=config.answer_form)
    scores = Scorer(rewards).score(list(texts), [[]] * len(texts), columns)
    assert scores.values_kb[0].tolist() == pytest.approx(wanted) and scores.problems == []
    run_training(load_config(f"{name}.toml", [*SMALL, "run.name=r"]).check(), report=Notes())
    lines = [json.loads(line) for line in (folder / "outputs/r/training_log.jsonl").read_text().splitlines()]
    assert [type(line["reward"]) for line in lines if "reward" in line] == [float]
    assert any("em" in line for line in lines) is (name in ("choice", "label"))


def test_a_task_of_reasoning_gym_trains(folder, gym):
    """The task's score is the reward; problems are reproducible and disjoint from the held-out ones."""
    config = load_config("gym.toml", [*SMALL, "run.name=r", "reward.timeout=0"]).check()
    train, held_out = load_rows(config.data)
    again = load_rows(config.data)
    assert (list(train), list(held_out)) == (list(again[0]), list(again[1])) and len(held_out) == 200
    assert 0 < len(train) <= 500
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    (reward,) = resolve_rewards(config.reward.functions)
    answer = train[0]["answer"]
    texts = [f"So <answer>{answer}</answer>", answer, "none"]
    scores = Scorer([reward]).score(texts, [[]] * 3, {"entry": [train[0]["entry"]] * 3})
    assert reward.name == "task_score" and scores.values_kb[0, :2].tolist() == [1.0, 1.0]
    assert scores.values_kb[0, 2] < 0.1
    run_training(config, report=Notes())
    assert "rewards/task_score/mean" in (folder / "outputs/r/training_log.jsonl").read_text()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("data.source=reasoning-gym:chain_summ", "no task .chain_summ.; did you mean chain_sum"),
        ('data.name="x"', r"data\.name = .x.: JSONDecodeError"),
        *(("data.name='{\"terms\": 1}'", "terms"), ("data.name='{\"max_terms\": 0}'", "max_terms")),
    ],
)
def test_an_unknown_task_is_a_one_line_error(folder, gym, change, line):
    """Unknown tasks and invalid settings are one-line errors."""
    with pytest.raises(UserError, match=line):
        load_rows(load_config("gym.toml", [change]).check().data)
