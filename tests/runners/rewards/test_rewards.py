"""The five built-in rewards: a table of cases each, properties, and hostile texts."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.answers.forms import answer_form
from runners.rewards.builtin import (
    REWARDS,
    built_in,
    soft_format_reward_func,
    strict_format_reward_func,
    xmlcount_reward_func,
)

correctness_reward_func, int_reward_func = REWARDS["correctness_reward_func"], REWARDS["int_reward_func"]
SHELL = "<reasoning>7+5=12</reasoning>\n<answer>12</answer>"
# Texts made of the pieces that the rewards look at, so that a random draw is often almost right.
pieces = st.sampled_from(
    ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "12", "$1,2", " ", "\n", "x", "<", "-"]
)
tagged_texts = st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)


def completions(*texts: str) -> list[list[dict[str, str]]]:
    """The texts in the form that a reward function takes."""
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        *(("<answer>$1,234</answer>", "1234", 2.0), ("<answer>1</answer>", "1234", 0.0)),
        *(("1234", "1234", 0.0), ("<answer>1</answer>", None, None)),
        *(("<answer>12</answer><answer>13</answer>", gold, paid) for gold, paid in (("12", 0.0), (13, 2.0))),
    ],
)
def test_correctness(text: str, gold: object, reward: float | None) -> None:
    """The reward is 2.0 if the last answer is right in any spelling, and None without a reference answer."""
    assert correctness_reward_func(completions(text), answer=[gold]) == [reward]


def test_correctness_reads_the_form_of_the_task() -> None:
    """The rewards read the configured form; an integer has no unit."""
    made = built_in(answer_form("last_number"))
    texts = completions("It is 18 dollars.", "<answer>18</answer>, no, 19", "none")
    assert made["correctness_reward_func"](texts, answer=["18"] * 3) == [2.0, 0.0, 0.0]
    assert made["int_reward_func"](texts) == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        *((text, 0.5) for text in ("12", "-5", "\u22125", "1,234", " 7\n", "007")),
        *((text, 0.0) for text in ("$12", "12.0", "12.", "1,23", "12 apples", "", "\u00b2")),
    ],
)
def test_int_reward(answer: str, reward: float) -> None:
    """The reward is 0.5 for an answer written as an integer."""
    assert int_reward_func(completions(f"<answer>{answer}</answer>")) == [reward]


@pytest.mark.parametrize(
    ("text", "strict", "soft", "count"),
    [
        *((SHELL, 0.5, 0.5, 0.5), ("<reasoning></reasoning><answer></answer>", 0.5, 0.5, 0.5)),
        *((f"So: {SHELL}", 0.0, 0.5, 0.5), (f"{SHELL} done", 0.0, 0.5, 0.496)),
        (f"{SHELL}{SHELL}", 0.0, 0.5, 0.5),
        ("<reasoning>a</reasoning> so <answer>1</answer>", 0.0, 0.0, 0.5),
        ("<reasoning><reasoning>a</reasoning><answer>1</answer>", 0.0, 0.5, 0.5),
        ("<reasoning>a <answer>1</answer></reasoning>", 0.0, 0.0, 0.488),
        ("<answer>1</answer><reasoning>a</reasoning>", 0.0, 0.0, 0.476),
        *(("<reasoning>a</reasoning><answer>1", 0.0, 0.0, 0.25), ("<answer>1</answer>", 0.0, 0.0, 0.25)),
        ("<answer>1</answer><answer>2</answer>", 0.0, 0.0, 0.25),
        *((f"{SHELL}{'x' * 499}", 0.0, 0.5, 0.001), (f"{SHELL}{'x' * 501}", 0.0, 0.5, 0.0)),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_format_rewards(text: str, strict: float, soft: float, count: float) -> None:
    """The format is checked strictly, anywhere in the text, and tag by tag."""
    assert strict_format_reward_func(completions(text)) == [strict]
    assert soft_format_reward_func(completions(text)) == [soft]
    assert xmlcount_reward_func(completions(text)) == [pytest.approx(count, abs=1e-12)]


@given(st.lists(tagged_texts, max_size=4))
def test_rewards_keep_their_range(texts: list[str]) -> None:
    """A reward returns a value in its range for each completion, independently of the others."""
    for name, function in REWARDS.items():
        high = 2.0 if name == "correctness_reward_func" else 0.5
        values = function(completions(*texts), answer=["12"] * len(texts), other=[None] * len(texts))
        assert len(values) == len(texts)
        assert all(value is not None and 0 <= value <= high for value in values)
        assert values == [function(completions(text), answer=["12"])[0] for text in texts]


TAGS = ("<answer>", "</answer>", "<reasoning>", "</reasoning>", "</reasoning> ", "<answer></answer>")


@pytest.mark.parametrize("unit", [*TAGS, "<reasoning></reasoning><answer>", "1", "1,234,", " ", "<"])
def test_hostile_texts_take_linear_time(unit: str) -> None:
    """All five rewards score a megabyte of repeats in less than a second of processor time."""
    text = unit * (1_000_000 // len(unit))
    start = time.thread_time()
    for function in REWARDS.values():
        function(completions(text, f"<answer>{text}</answer>"), answer=["12", "12"])
    assert time.thread_time() - start < 1.0
