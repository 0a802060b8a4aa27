"""`grpo eval` with tools and environments: the same success, turns, calls and rewards as in a run."""

import json

import attrs
import numpy as np
import pytest

from runners.config.loading import load_config
from runners.data.datasets import load_split
from runners.engines.settings import sampling_of
from runners.environments.environments import all_rewards, build_environments
from runners.environments.tool_calls import CallReader, ToolCall
from runners.evaluation.comparison import wilson
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.evaluation import EvalResult, evaluate, of_ranks
from runners.evaluation.measurement import choose_problems, measure
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.rewards.scoring import Scorer, resolve_rewards
from runners.user_code.worker import Worker
from tests.support.commands import grpo

SOURCE = '''
class Even:
    """Likes even answers, and gives no reward for those that end with 7."""

    def reset(self, answer, **row):
        """Begin."""
        self.answer, self.asked = int(answer), 0
        if self.answer % 10 == 5:
            raise ValueError("no fives")

    def ask(self, a: int) -> int:
        """
        Ask.

        Args:
            a: A number.
        """
        self.asked += 1
        return 10 // (a - self.answer % 3)

    def get_reward(self):
        """Half, or all."""
        return None if self.answer % 10 == 7 else 1.0 if self.answer % 2 == 0 else 0.5


def double(a: int) -> int:
    """
    Twice a number.

    Args:
        a: The number.
    """
    return 2 * a
'''
ROWS = [{"question": f"{n}+3", "answer": str(n + 3)} for n in range(8)]
WORKER = Worker()
ODD = ToolCall("ask", {"a": 2})


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an environment and data; the model's first turn is always a call."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "even.py").write_text(SOURCE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(CallReader, "read", lambda self, text: (text, [ODD]))
    return tmp_path


@pytest.fixture(scope="module")
def model():
    """The embedded model."""
    return load_inference("embedded", Platform(backend="cpu"))


def config_of(*overrides):
    """A config with the environment and little to do."""
    given = (
        "model.path=embedded", "data.source=rows.jsonl", "data.eval_split=train", "reward.functions=[]",
        "env.factory=even.py:Even", "env.max_turns=2", "rollout.stop=['e', '1', '=']",
        "eval.max_new_tokens=60", "eval.samples=0", "data.system_prompt=",
    )  # fmt: skip
    return load_config(None, [*given, *overrides])


def problems_of(model, config):
    """The config's environments for this model, and the problems."""
    environments = build_environments(
        config.env, config.data, model.tokenizer, model.decoder, model.eos_ids, config.folders, WORKER
    )
    rows = load_split(config.data, config.data.eval_split)
    assert environments is not None
    return environments, choose_problems(rows, model, config, environments.chat.schemas)[0]


def measured(model, config, rewards=(), **how):
    """The measurement of `grpo eval`."""
    environments, chosen = problems_of(model, config)
    every = all_rewards(rewards, environments)
    return measure(model, "it", chosen, config, every, environments=environments, **{"rows": 3, **how})


def evaluated(model, config):
    """The evaluation of a run."""
    environments, chosen = problems_of(model, config)
    sampling = sampling_of(config, model.eos_ids)
    evaluator = Evaluator(
        engine=model.engine, decoder=model.decoder, nudge=config.data.nudge, rows=3,
        environments=environments, form=config.answer_form, scorer=Scorer(all_rewards((), environments)),
    )  # fmt: skip
    return evaluate(evaluator, list(chosen.values()), attrs.evolve(sampling, max_new_tokens=60))


def test_figures_of_an_environment(place, model):
    """Rewards, success, calls and failures of each problem are as computed by hand, also in a run."""
    found, own = measured(model, config_of()), evaluated(model, config_of())
    answers = np.array([int(row["answer"]) for row in ROWS])
    failing = answers % 10 == 5
    reward = np.where(failing | (answers % 10 == 7), np.nan, np.where(answers % 2, 0.5, 1.0))
    assert np.array_equal(found.metrics["reward/Even"].values, reward, equal_nan=True)
    assert found.metrics["success"].values.tolist() == (reward == 1).tolist()
    assert found.metrics["success"].interval == wilson(4, 8)
    calls, turns = found.metrics["calls"].values, found.metrics["turns"].values
    assert calls.tolist() == (turns - 1).tolist() and not calls[failing].any() and calls.max() == 1
    known = (turns == 2) & ~failing
    assert known.any()
    divided = 10 * (answers % 3 == 2)
    assert found.metrics["failed calls"].values[known].tolist() == (divided[known] > 0).astype(float).tolist()
    assert any("no fives" in problem for problem in found.problems)
    assert [row["completion"] for row in found.completions] == [each.text for each in own.completions]
    known = [None if value != value else value for value in reward.tolist()]
    failures = found.metrics["failed calls"].values
    columns = found.metrics["success"].values, known, turns, calls, failures
    theirs = [(c.success, c.reward, c.turns, c.calls, c.failures) for c in own.completions]
    assert theirs == [*zip(*columns, strict=True)]
    logged = own.metrics
    assert logged["eval/success"] == 0.5 and logged["eval/reward"] == pytest.approx(np.nanmean(reward))


def test_samples_and_functions_without_a_class(place, model):
    """Without get_reward, an episode succeeds with the right answer; pass@k is included."""
    config = config_of("env.factory=", "env.tools=['even.py:double']", "reward.functions=['int_reward_func']")
    rewards = resolve_rewards(config.reward.functions)
    found = measured(model, config, rewards, num=2, ks=(1, 2), rows=5)
    assert found.metrics["success"].values.tolist() == found.metrics["exact match"].values.tolist()
    assert {"pass@1", "pass@2", "sampled success", "sampled calls"} <= set(found.metrics)
    samples = [row for row in found.completions if row["kind"] == "sample"]
    assert [row["problem"] for row in samples[::2]] == list(found.indices) and len(samples) == 16
    assert all(row["messages"][0]["role"] == "assistant" for row in samples)


def test_data_without_answers(place, model):
    """The environment determines success: pass@k counts successes, and there is no exact match."""
    source = SOURCE.replace("reset(self, answer,", "reset(self, question,")
    (place / "even.py").write_text(source.replace("int(answer)", "int(question.split('+')[0])"))
    (place / "rows.jsonl").write_text("".join(json.dumps({"question": f"{n}+3"}) + "\n" for n in range(4)))
    config = config_of("data.answer=")
    found = measured(model, config, num=2, ks=(1, 2), rows=5)
    assert found.metrics["success"].values.tolist() == [True, False, True, False]
    assert found.metrics["pass@1"].values.tolist() == found.metrics["pass@2"].values.tolist() == [1, 0, 1, 0]
    assert "exact match" not in found.metrics
    assert not {"answer", "extracted", "correct"} & set(found.completions[0])


def test_results_of_several_ranks_are_in_the_problems_order():
    """Rank r of N has the problems r, r + N, …; the time is that of the slowest rank."""
    rest = {"answer": None, "right": None, "rewards": {"r": None}, "reward": None, "tokens": 1}
    each = tuple(Completion(text=text, **rest, finish="stop", turns=2) for text in "abcde")
    whole = EvalResult(2.0, each, ("odd",))
    parts = [EvalResult(r + 1.0, whole.completions[r::2], ("odd",)) for r in range(2)]
    assert of_ranks([json.loads(json.dumps(attrs.asdict(part))) for part in parts]) == whole


def test_the_command(place):
    """The command prints a table that starts with success, and writes JSON."""
    keys = "env.factory=even.py:Even", "env.max_turns=2", "reward.functions=[]", "rollout.stop=['e', '1']"
    options = "--data rows.jsonl --split train --samples 4 --max-tokens 30 --out rows.out --json scores.json"
    result = grpo("eval", "embedded", *options.split(), *(f"--set={key}" for key in keys))
    lines = [line.split("|")[1].strip() for line in result.stdout.splitlines()[2:]]
    assert lines[:4] == ["success", "exact match", "reward", "reward/Even"] and "failed calls" in lines
    scores = json.loads((place / "scores.json").read_text())
    assert set(scores["models"]["embedded"]["success"]) == {"mean", "interval"}
    row = json.loads((place / "rows.out").read_text().split("\n")[0])
    assert {"messages", "success", "turns"} <= row.keys()
