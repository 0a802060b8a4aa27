"""TRL's reward functions run unchanged: parameters, formats, logging, async, None."""

import asyncio
import json
import math
import re
from typing import Any

import numpy as np

from runners.config.loading import load_config
from runners.rewards.calls import TrainerState
from runners.rewards.library import on_texts
from runners.rewards.scoring import Reward, Scorer
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_runs import small

TEXTS = ["<think>2 and 2</think>\nSo it is 4.", "It is 4.", "<think>one <think>two</think></think> 5"]
IDS = [[1] * 10, [2] * 18, [3] * 30]
PROMPTS = [[{"role": "user", "content": f"question {n}"}] for n in range(3)]
COLUMNS = {"solution": ["4", "4", None], "task": ["sum", "sum", "essay"]}


def score(*functions, **settings):
    """Score the three texts under TRL's arguments."""
    rewards = [Reward(getattr(f, "__name__", "f"), f) for f in functions]
    state = TrainerState(global_step=30, max_steps=100, epoch=0.5, num_train_epochs=1)
    return Scorer(rewards, 10.0, **settings).score(TEXTS, PROMPTS, COLUMNS, IDS, state)


def think_form(completions, **kwargs):
    """Rewards a text that starts with one thought."""
    form = re.compile(r"^<think>(?!.*<think>).*?</think>", re.DOTALL)
    return [1.0 if form.match(completion[0]["content"]) else 0.0 for completion in completions]


def right_number(completions, solution, log_extra: Any = None, log_metric: Any = None, **kwargs):
    """Rewards the right last number; None for rows without a solution."""
    found = [(re.findall(r"\d+", completion[0]["content"]) or [""])[-1] for completion in completions]
    given = [None if want is None else float(got == want) for got, want in zip(found, solution, strict=True)]
    log_extra("found", found)
    log_metric("solved", sum(value == 1 for value in given) / len(given))
    return given


class SoftOverlong:
    """A length penalty that is an object and accepts only token ids, as in TRL."""

    __name__ = "soft_overlong"

    def __init__(self, limit, cache):
        self.limit, self.cache = limit, cache

    def __call__(self, completion_ids, **kwargs):
        over = [len(ids) - self.limit + self.cache for ids in completion_ids]
        return [-min(1.0, max(0.0, each / self.cache)) for each in over]


async def judged(prompts, completions, task, **kwargs):
    """Scores completions concurrently; returns None for essays."""

    async def ask(prompt, completion, kind):
        await asyncio.sleep(0.01)
        assert prompt[-1]["role"] == "user" and completion[0]["role"] == "assistant"
        return None if kind == "essay" else float(len(prompt[-1]["content"]))

    return list(await asyncio.gather(*map(ask, prompts, completions, task)))


def test_conversations_columns_and_none():
    """One call scores with a plain function, a column, None, an object and an async function."""
    scores = score(think_form, right_number, SoftOverlong(20, 4), judged)
    assert scores.problems == []
    nan = math.nan
    np.testing.assert_array_equal(scores.values_kb, [[1, 0, 0], [1, 1, nan], [-0.0, -0.5, -1], [10, 10, nan]])


def test_a_reward_can_log():
    """`log_extra` logs a column, `log_metric` a number; a column of another length is an error."""
    scores = score(right_number, think_form)
    assert scores.extras == {"found": ["4", "4", "5"]}
    assert scores.metrics == {"solved": [2 / 3]}

    def wrong(completions, log_extra, **kwargs):
        log_extra("half", [1])
        return [0.0] * 3

    assert "received 1 values for 3 completions" in score(wrong).problems[0]


def test_functions_of_plain_texts():
    """`on_texts` passes strings to plain and async functions and keeps their parameters."""

    def mentions(prompts, completions, task):
        return [float(p == f"question {n}") * (completions[n] == TEXTS[n]) for n, p in enumerate(prompts)]

    async def length(completions, **kwargs):
        await asyncio.sleep(0)
        return [len(text) for text in completions]

    scores = score(on_texts(mentions), on_texts(length), think_form)
    assert scores.problems == []
    assert scores.values_kb[:2].tolist() == [[1, 1, 1], [len(text) for text in TEXTS]]
    assert Reward("mentions", on_texts(mentions)).parameters.needed == ("prompts", "completions", "task")


def test_a_run_passes_its_state_and_writes_what_was_logged(tmp_path, monkeypatch):
    """Updates so far at each batch step, of how many, and of how many epochs; the logged metric and column
    reach the two logs. A checkpoint has the update whose weights the sampler has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def spy(completions, trainer_state, log_extra, log_metric, **columns):\n"
        "    log_metric('spied/step', trainer_state.global_step)\n"
        "    of = [trainer_state.max_steps, trainer_state.num_train_epochs]\n"
        "    log_extra('of', [of] * len(completions))\n"
        "    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    toml = small(
        rollout={"num_generations": 2, "max_new_tokens": 8},
        optim={"batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "num_epochs": 3},
        checkpoint={"every": 4},
        reward={"functions": ["mine.py:spy"]},
    )
    (tmp_path / "train.toml").write_text(toml)
    folder = run_training(load_config("train.toml"), report=Quiet()).folder
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    updates = [line for line in log if "loss" in line]
    assert [line["spied/step"] for line in updates] == [0.0, 1.0]
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(row["extra"] == {"of": [2, 3]} for row in rows)
    loop = json.loads((folder / "checkpoint-4/trainer_state.json").read_text())["loop"]
    assert (loop["sampler"]["version"], loop["batch_step"]) == (2, 4)
