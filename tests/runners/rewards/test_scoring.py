"""Running rewards: their arguments, their usable results, and reports of all failures."""

import asyncio
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from runners.errors import UserError
from runners.rewards.scoring import Reward, Scorer, Scores

TEXTS = ["alpha", "beta", "gamma"]


def score(*functions: Any, on_error: Any = "skip") -> Scores:
    """Score the three texts with functions named f0, f1, …."""
    rewards = [Reward(f"f{k}", function) for k, function in enumerate(functions)]
    return Scorer(rewards, on_error=on_error).score(TEXTS, ["p", "q", "r"], {})


def assert_row(values: np.ndarray, expected: list[float | None]) -> None:
    """A row equals the expected values, NaN standing for None."""
    np.testing.assert_array_equal(values, np.array(expected, dtype=np.float64))


BEYOND = "returned a number beyond 1e+15, whose square exceeds float32, at completion 0"


@pytest.mark.parametrize(
    ("result", "expected", "note"),
    [
        ([1, 0.5, None], [1.0, 0.5, None], ""),
        (np.array([1.0, 2.0, 3.0], dtype=np.float32), [1.0, 2.0, 3.0], ""),
        ([np.float32(0.5), np.int64(3), np.bool_(True)], [0.5, 3.0, 1.0], ""),
        ([Fraction(1, 4), Decimal("0.5"), np.array(2.0)], [0.25, 0.5, 2.0], ""),
        ([mx.array(2.0) * k for k in range(3)], [0.0, 2.0, 4.0], ""),
        ([1e15, -1e15, 0.0], [1e15, -1e15, 0.0], ""),
        ([1.0, "2", "3"], [1.0, None, None], 'a number or None, at completion 1 ("2") and 1 more'),
        ([1.0, float("nan"), 2.0], [1.0, None, 2.0], "not finite, at completion 1 (nan)"),
        ([float("-inf"), 1, 10**400], [None, 1.0, None], "not finite, at completion 0 (-inf) and 1 more"),
        ([1e39, 1.0, 2.0], [None, 1.0, 2.0], f"{BEYOND} (1e+39)"),
        (["\x1b[31m\x9b", 1.0, 2.0], [None, 1.0, 2.0], r'None, at completion 0 ("\u001b[31m'),
        ([[1.0], 1.0, 2.0], [None, 1.0, 2.0], "returned list"),
        ([1.0, 2.0], [None] * 3, "returned 2 values for 3 completions"),
        (1.0, [None] * 3, "returned float; expected a list of 3 numbers"),
        (np.zeros((3, 1)), [None] * 3, "returned list, expected a number or None, at completion 0"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_usable_values_of_a_result(result: Any, expected: list[float | None], note: str) -> None:
    """All common numbers count; any other value is no reward for that completion, with one message."""
    scores = score(lambda completions: result, lambda completions: [1.0, 1.0, 1.0])
    assert_row(scores.values_kb[0], expected)
    assert_row(scores.values_kb[1], [1.0, 1.0, 1.0])
    told = [line.startswith('reward "f0" ') and note in line for line in scores.problems]
    assert told == [True] * bool(note)
    if note:
        with pytest.raises(UserError, match=re.escape(note)):
            score(lambda completions: result, on_error="raise")


def test_an_error_is_one_line_with_its_place() -> None:
    """Errors of plain and async rewards are one printable line with their place."""

    def fails(completions):
        raise OSError("\x1b[31m\nred\x9b")

    async def fails_later(completions):
        raise OSError("\x1b[31m\nred\x9b")

    scores = Scorer([Reward("f", fails), Reward("f", fails_later)]).score(["a"], ["p"], {})
    where = re.compile(r"test_scoring\.py, line \d+: ")  # the line of the reward that raised
    line = r'reward "f" failed: OSError: \x1b[31m red\x9b'
    assert [where.sub("", problem) for problem in scores.problems] == [line] * 2
    assert all(where.search(problem) for problem in scores.problems)


def test_a_reward_that_fails_at_every_completion_is_named() -> None:
    """`failed` contains rewards that raised or returned only invalid values; None is valid."""
    nan = float("nan")
    results = ["a", 1.0, 1.0], ["a", nan, nan], [None, None, None]
    rewards = [lambda completions, result=result: result for result in results]
    scores = score(lambda completions: 1 / 0, *rewards)
    assert set(scores.failed) == {0, 2}
    assert scores.failed[2].line.startswith('reward "f2" returned str, expected a number or None, at')


def test_async_results_behind_a_plain_function() -> None:
    """An awaitable returned by a plain function is awaited, also if the caller has a running loop."""

    async def later():
        await asyncio.sleep(0)
        return [1.0, 2.0, 3.0]

    async def one(completions):
        return [1.0] * 3

    async def caller():
        return score(one)

    assert_row(score(lambda completions: later()).values_kb[0], [1.0, 2.0, 3.0])
    assert asyncio.run(caller()).problems == []


def test_rewards_receive_separate_lists() -> None:
    """A reward that changes its lists affects neither other rewards nor the caller."""

    def spoils(completions, tags):
        texts = [completion[0]["content"] for completion in completions]
        completions.reverse()
        tags.clear()
        return [float(text == "b") for text in texts]

    tags = [1, 2]
    scores = Scorer([Reward(name, spoils) for name in "fg"]).score(["a", "b"], ["p"] * 2, {"tags": tags})
    assert scores.values_kb.tolist() == [[0.0, 1.0]] * 2 and tags == [1, 2]


def test_a_missing_column_is_an_error() -> None:
    """The message contains the nearest column; only environments may be missing among the fixed arguments."""

    def needy(completions, prompts, answer, hint=None, **columns):
        return [float(completions[0][0]["content"] == "a")]

    scorer = Scorer([Reward("f", needy)])
    assert_row(scorer.score(["a"], ["p"], {"answer": ["1"], "completions": ["x"]}).values_kb[0], [1.0])
    with pytest.raises(UserError, match="requires the column answer; the data has anwser; did you mean anws"):
        scorer.score(["a"], ["p"], {"anwser": ["1"]})
    with pytest.raises(UserError, match=r'reward "g" requires environments, but env\.factory is not set'):
        Scorer([Reward("g", lambda environments: [0.0])]).score(["a"], ["p"], {})


def test_reserved_metric_names_are_refused() -> None:
    """A reserved name is an error of the reward."""

    def logs(completions, log_metric):
        log_metric("accuracy", 1.0)
        log_metric("update_skipped", 1.0)
        return [1.0, 2.0, 3.0]

    (line,) = score(logs).problems
    assert "ValueError: log_metric: the name update_skipped is reserved" in line
