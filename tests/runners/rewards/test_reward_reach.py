"""What a reward cannot do to the run that calls it, whatever its arguments, results and exceptions are."""

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from runners.config.loading import load_config
from runners.errors import UserError
from runners.rewards.scoring import Reward, Scorer
from runners.rewards.trl_arguments import RewardLog, is_own_name
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.tiny_runs import PROBLEMS, Notes

ROOT = Path(__file__).resolve().parents[3]
TEXTS = ["one", "two"]
MESSAGES = [[{"role": "user", "content": f"question {n}"}] for n in range(2)]


def score(*functions, columns=None, weight=1.0, ids=None):
    """The scores of two completions."""
    rewards = [Reward(function.__name__, function, weight) for function in functions]
    return Scorer(rewards).score(TEXTS, MESSAGES, columns or {}, ids or [[1, 2], [3]])


def spoil(value):
    """Changes everything in an argument that can be changed."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        spoil(part)
    if isinstance(value, dict | list | set | bytearray):
        value.clear()
    if isinstance(value, np.ndarray):
        value[:] = 0


def test_arguments_are_copies():
    """Prompts, messages, columns and tokens are used again: by the other rewards, the log, the next epoch."""
    seen = []

    def spoils(completions, **arguments):
        seen.append(json.dumps({name: arguments[name] for name in ("prompts", "completion_ids", "tags")}))
        spoil(completions)
        for name in ("prompts", "completion_ids", "tags", "more", "array", "bytes"):
            spoil(arguments[name])
        return [1.0, 2.0]

    def again(completions, **arguments):
        return spoils(completions, **arguments)

    columns = {
        "tags": [["a", {"b": [1]}], []],
        "more": [{1, 2}, ({"x": [1]},)],
        "array": [np.ones(2), None],
        "bytes": [bytearray(b"x"), b"y"],
    }
    ids = [[1, 2], [3]]
    scores = score(spoils, again, columns=columns, ids=ids)
    assert scores.problems == [] and scores.values_kb.tolist() == [[1, 2], [1, 2]]
    assert seen[0] == seen[1] and "question 1" in seen[0]
    assert MESSAGES[1] == [{"role": "user", "content": "question 1"}] and ids == [[1, 2], [3]]
    assert columns["tags"] == [["a", {"b": [1]}], []] and columns["more"] == [{1, 2}, ({"x": [1]},)]
    assert columns["array"][0].tolist() == [1, 1] and columns["bytes"][0] == b"x"


def test_async_rewards_get_copies_too():
    """They run together, and each has its own."""

    async def spoils(completions, prompts):
        spoil(prompts)
        return [float(len(prompts)), 0.0]

    async def reads(prompts, completions):
        return [float(len(prompts)), 0.0]

    assert score(spoils, reads).values_kb.tolist() == [[0, 0], [2, 0]]


class Mute(Exception):
    """An exception that cannot be shown."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Bare(Exception):
    """An exception whose text is none."""

    def __str__(self):
        return 3  # pyright: ignore


class Fatal(Exception):
    """An exception whose text ends the process."""

    def __str__(self):
        raise SystemExit(0)


class Odd(float):
    """A float that is none."""

    def __float__(self):
        raise ZeroDivisionError

    def __repr__(self):
        raise KeyError("no text")

    __str__ = __repr__


class Silent:
    """An object that cannot be shown."""

    def __repr__(self):
        raise OSError

    __str__ = __repr__


def raising(error):
    """A reward that raises this."""

    def reward(completions, **_):
        raise error

    return reward


def giving(*values):
    """A reward that returns this."""

    def reward(completions, **_):
        return list(values)

    return reward


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Mute(), "failed: Mute: (its text fails with ValueError)"),
        (Bare(), "failed: Bare: (its text fails with TypeError)"),
        (Fatal(), "failed: Fatal: (its text fails with SystemExit)"),
        (OSError("\x1b[31m\nred\x9b"), r"failed: OSError: \x1b[31m red\x9b"),
    ],
    ids=["a text that raises", "a text that is none", "a text that exits", "a text with escapes"],
)
def test_exceptions_that_cannot_be_shown(error, line):
    """They are told by their class; plain and async."""

    async def later(completions, **_):
        raise error

    scores = score(raising(error), later)
    assert [problem.partition(" ")[2].partition(" ")[2] for problem in scores.problems] == [line, line]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (Odd(1), "returned a Odd that is no float, as it raises ZeroDivisionError, at completion 0 (a Odd, "),
        (Silent(), "returned Silent, expected a number or None, at completion 0 (a Silent, whose text fails"),
        (1e39, "returned a number beyond 1e+18, whose square float32 cannot hold, at completion 0 (1e+39)"),
        (-(10**400), "returned a number that is not finite, at completion 0"),
        (10**30, "returned a number beyond 1e+18"),
        (Decimal("1e99"), "returned a number beyond 1e+18"),
        (np.float64("inf"), "returned a number that is not finite"),
        ("\x1b[31m\x9b", r'returned str, expected a number or None, at completion 0 ("\u001b[31m'),
    ],
    ids=lambda part: type(part).__name__,
)
def test_values_that_are_no_rewards(value, line):
    """Each is named with its completion; the others count."""
    scores = score(giving(value, 2.0))
    (problem,) = scores.problems
    assert line in problem and np.isnan(scores.values_kb[0, 0]) and scores.values_kb[0, 1] == 2


def test_the_largest_reward_that_counts():
    """Its square is within float32; the weight counts."""
    assert score(giving(1e18, -1e18)).problems == []
    assert score(giving(1e17, 1e16), weight=10.0).problems == []
    assert "beyond 1e+18" in score(giving(1e18, 1e16), weight=10.0).problems[0]
    assert score(giving(1e18, 1.0), weight=1e-9).problems == []


def test_what_is_logged_is_plain():
    """Nothing of a reward's own class is left to run while a line is written."""

    class Text(str):
        def __str__(self):
            raise ValueError

    log = RewardLog(4)
    log.log_extra("x", [Odd(1.5), Text("a"), True, np.int64(3)])
    assert log.extras == {"x": [1.5, "a", True, 3]}
    assert [type(value) for value in log.extras["x"]] == [float, str, bool, int]
    for name in (3, None, Silent()):
        with pytest.raises(TypeError, match="expected a text as a name"):
            log.log_extra(name, [1, 2, 3, 4])
        with pytest.raises(TypeError, match="expected a text as a name"):
            log.log_metric(name, 1.0)


def test_names_of_the_logs_own_are_refused():
    """They are left out, with a line; others are logged, and the reward counts."""

    def logs(completions, log_metric, **_):
        for name in ("update", "kl", "update_skipped", "rewards/x/mean", "time/new", "accuracy", "my/kl"):
            log_metric(name, 1.0)
        return [1.0, 2.0]

    scores = score(logs)
    assert set(scores.metrics) == {"accuracy", "my/kl"} and scores.values_kb.tolist() == [[1, 2]]
    assert len(scores.problems) == 5
    assert scores.problems[0] == (
        'log_metric: "update" is a name of the log\'s own and is left out; call it something else'
    )


CONFIG = f"""
run = {{name = "r", output_dir = "out"}}
model.path = "embedded"
data = {{source = "{PROBLEMS}", eval_split = "valid", system_prompt = ""}}
rollout = {{num_generations = 2, max_new_tokens = 8, launch = "eval"}}
loss = {{preset = "dapo"}}
optim = {{batch_size = 2, max_steps = 3}}
eval = {{samples = 2}}
checkpoint.every = 2
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A fresh current folder with a config and a reward."""
    monkeypatch.chdir(tmp_path)

    def write(body, more=""):
        (tmp_path / "mine.py").write_text(f"import os, sys\ndef mine(completions, prompts, **_):\n{body}\n")
        (tmp_path / "train.toml").write_text(f'{CONFIG}reward.functions = ["mine.py:mine"]\n{more}')

    return write


LENGTHS = "    return [float(len(c[0]['content'])) for c in completions]"


def test_every_name_of_a_real_log_is_its_own(place):
    """A name that is added to the log is refused from then on."""
    place(LENGTHS)
    folder = run_training(
        load_config("train.toml", ["loss.beta=0.1", "rollout.quantization=affine-8"]), report=Quiet()
    ).folder
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert "kl" in names and "em" in names
    assert [name for name in names if not is_own_name(name)] == []


def test_a_reward_that_spoils_its_arguments_changes_no_log(place):
    """The prompts in completions.jsonl and the next epoch's are as they were."""
    logs = []
    for body in (
        LENGTHS,
        "    for p in prompts:\n        p[-1]['content'] = 'spoilt'\n        p.clear()\n" + LENGTHS,
    ):
        place(body)
        config = load_config("train.toml", ["data.max_samples=2", "run.overwrite=true"])
        folder = run_training(config, report=Quiet()).folder
        logs.append((folder / "completions.jsonl").read_text())
    assert logs[0] == logs[1] and "spoilt" not in logs[1]


def test_a_reward_of_1e39_is_named_and_the_weights_stay_finite(place):
    """In a run: a line, no skipped update."""
    place("    return [1e39 if n % 2 else 1.0 for n in range(len(completions))]")
    report = Notes()
    folder = run_training(load_config("train.toml"), report=report).folder
    assert any("returned a number beyond 1e+18" in line for line in report.lines)
    assert "update_skipped" not in (folder / "training_log.jsonl").read_text()


def test_raise_names_the_log_as_well(place):
    """With on_error = "raise" a value that is none still ends the run with its line."""
    place("    return [1e39] * len(completions)", 'reward.on_error = "raise"\n')
    with pytest.raises(UserError, match=r"returned a number beyond 1e\+18"):
        run_training(load_config("train.toml"), report=Quiet())
