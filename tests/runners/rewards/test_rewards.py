"""The five text rewards: a table of cases each, number parsing as a property, and hostile texts."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.rewards.builtin import (
    REWARDS,
    correctness_reward_func,
    extract_answer,
    int_reward_func,
    numbers_equal,
    parse_number,
    soft_format_reward_func,
    strict_format_reward_func,
    xmlcount_reward_func,
)

GSM8K = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "gsm8k"
SHELL = "<reasoning>7+5=12</reasoning>\n<answer>12</answer>"
RANGES = {
    "correctness_reward_func": (0.0, 2.0),
    "int_reward_func": (0.0, 0.5),
    "strict_format_reward_func": (0.0, 0.5),
    "soft_format_reward_func": (0.0, 0.5),
    "xmlcount_reward_func": (0.0, 0.5),
}
# Texts made of the pieces that the rewards look at, so that a random draw is often almost right.
pieces = st.sampled_from(
    ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "12", "$1,2", " ", "\n", "x", "<", "-"]
)
tagged_texts = st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)

contents = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20)
blanks = st.text(" \n\t", max_size=3)


def completions(*texts: str) -> list[list[dict[str, str]]]:
    """The texts in the form that a reward function takes."""
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>\n 5 \n</answer>", "5"),
        ("<answer>5</answer> no: <answer>7</answer>", "7"),
        ("<answer>5</answer> <answer>7", "5"),
        ("<answer>5</answer> and </answer>", "5"),
        ("<answer>1 <answer>5</answer></answer>", "5"),
        ("<answer>", None),
        ("</answer>", None),
        ("5</answer> <answer>6", None),
        ("<answer> </answer>", None),
        ("<answer>5</answer><answer></answer>", None),
        ("<Answer>5</Answer>", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, expected: str | None) -> None:
    """The last complete pair counts; unclosed, reversed and empty ones are no answer."""
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234", 1234),
        ("1,234", 1234),
        ("$1234", 1234),
        ("1234.0", 1234),
        ("1,234,567.50", Fraction("1234567.5")),
        ("1\u202f234", 1234),
        ("1\u00a0234\u00a0567", 1234567),
        ("-5", -5),
        ("+5", 5),
        ("\u22125", -5),
        ("\u20135", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("- 5", -5),
        ("$ 1,234", 1234),
        ("5 €", 5),
        ("$5$", 5),
        ("5.", 5),
        ("18.50.", Fraction("18.5")),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1/2", Fraction(1, 2)),
        ("-3 / 4", Fraction(-3, 4)),
        ("50%", 50),
        ("50 %.", 50),
        ("007", 7),
        ("1e3", 1000),
        ("2.5E-05", Fraction(25, 10**6)),
        ("  12\n", 12),
    ],
)
def test_parse_number_reads(text: str, value: Fraction | int) -> None:
    """Every accepted spelling has its exact value."""
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "-", "$", "%", "5..", "1.2.3", "--5", "-$-5", "1,23", "1,2345", "0,123", "1,234\u202f567"),
        *("12 apples and 3", "18 dollars", "12 million", "12 5", "12 345", "x", "twelve", "5=5", "<5>"),
        *("1 1/2", "1/0", "1/2/3", "1/-2", "nan", "inf", "1e9999", "0x10", "1_000", "1" * 401),
        *("\u0661\u0662", "\uff11", "\u00bd"),
    ],
)
def test_parse_number_refuses(text: str) -> None:
    """A text that is not one number, whole and alone, is not a number."""
    assert parse_number(text) is None


@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_spellings_of_one_number_agree(digits: int, places: int) -> None:
    """A decimal means the same plain, grouped, with a currency sign, with zeros and blanks added."""
    value = Fraction(digits, 10**places)
    sign, size = ("-" if digits < 0 else ""), abs(digits)
    whole, rest = divmod(size, 10**places)
    tail = f".{rest:0{places}d}" if places else ""
    plain, grouped = f"{whole}{tail}", f"{whole:,}{tail}"
    spellings = [
        f"{sign}{plain}",
        f"{sign}{grouped}",
        f"{sign}${grouped}",
        f"${sign}{plain}",
        f"{sign}{plain}.",
    ]
    spellings += [f" {sign}{whole}{tail or '.'}00\n", f"{sign}{size}/{10**places}"]
    assert [parse_number(text) for text in spellings] == [value] * len(spellings)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_agree_with_themselves(value: float) -> None:
    """A float column's own spelling is read back, exponents and all."""
    number = parse_number(str(value))
    assert number is not None
    assert float(number) == value


@given(st.text(max_size=150))
def test_parse_number_takes_any_text(text: str) -> None:
    """No text raises, and what is read as a number is also read with blanks around it."""
    assert parse_number(f"\n {text} ") == parse_number(text)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("1,234", "1234.0", True),
        ("$1234", "1234", True),
        (18, "18.00", True),
        (5e-5, "0.00005", True),
        (1e300, f"1{'0' * 300}", True),
        (0.5, "1/2", True),
        ("0.1", "0.10000000000000001", False),
        ("18", "19", False),
        ("18 dollars", "18", False),
        (" red ", "red", True),
        ("red", "Red", False),
        ("12 apples", "12 apples", True),
        (None, None, False),
        (None, "None", False),
    ],
)
def test_numbers_equal(a: object, b: object, expected: bool) -> None:
    """Numbers are compared exactly as numbers, other texts as texts, both ways round."""
    assert numbers_equal(a, b) is expected
    assert numbers_equal(b, a) is expected


def test_correctness() -> None:
    """2.0 for the right answer in any spelling, 0.0 for a wrong or absent one, None without a gold answer."""
    texts = completions("<answer>$1,234</answer>", "<answer>1</answer>", "1234", "<answer>1</answer>")
    assert correctness_reward_func(texts, answer=["1234", "1234", "1234", None]) == [2.0, 0.0, 0.0, None]


def test_correctness_reads_the_last_answer() -> None:
    """Listing guesses does not pay: only the last answer is compared."""
    text = completions("<answer>12</answer><answer>13</answer>")
    assert correctness_reward_func(text, answer=["12"]) == [0.0]
    assert correctness_reward_func(text, answer=[13]) == [2.0]


def test_correctness_refuses_another_length() -> None:
    """A gold column of another length is an error that names both lengths, never a silent cut."""
    with pytest.raises(ValueError, match="expected 2 entries, one a completion, found 1"):
        correctness_reward_func(completions("a", "b"), answer=["1"])


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        *((text, 0.5) for text in ("12", "-5", "\u22125", "1,234", " 7\n", "007")),
        *((text, 0.0) for text in ("$12", "12.0", "12.", "1,23", "12 apples", "", "\u00b2")),
    ],
)
def test_int_reward(answer: str, reward: float) -> None:
    """0.5 for an answer written as an integer."""
    assert int_reward_func(completions(f"<answer>{answer}</answer>")) == [reward]


@pytest.mark.parametrize(
    ("text", "strict", "soft", "count"),
    [
        (SHELL, 0.5, 0.5, 0.5),
        (f"\n {SHELL}\n", 0.5, 0.5, 0.5),
        ("<reasoning></reasoning><answer></answer>", 0.5, 0.5, 0.5),
        (f"So: {SHELL}", 0.0, 0.5, 0.5),
        (f"{SHELL} done", 0.0, 0.5, 0.496),
        (f"{SHELL}{SHELL}", 0.0, 0.5, 0.5),
        ("<reasoning>a</reasoning> so <answer>1</answer>", 0.0, 0.0, 0.5),
        ("<reasoning><reasoning>a</reasoning><answer>1</answer>", 0.0, 0.5, 0.5),
        ("<reasoning>a</reasoning><answer>1</answer></answer>", 0.0, 0.5, 0.5),
        ("<reasoning>a <answer>1</answer></reasoning>", 0.0, 0.0, 0.488),
        ("<answer>1</answer><reasoning>a</reasoning>", 0.0, 0.0, 0.476),
        ("<reasoning>a</reasoning><answer>1", 0.0, 0.0, 0.25),
        ("</reasoning><answer>1</answer><reasoning>", 0.0, 0.0, 0.239),
        ("<reasoning>a</answer></reasoning><answer>1", 0.0, 0.0, 0.229),
        ("<answer>1</answer>", 0.0, 0.0, 0.25),
        ("<answer>1</answer><answer>2</answer>", 0.0, 0.0, 0.25),
        ("</answer><answer></reasoning><reasoning>", 0.0, 0.0, 0.0),
        (f"{SHELL}{'x' * 499}", 0.0, 0.5, 0.001),
        (f"{SHELL}{'x' * 501}", 0.0, 0.5, 0.0),
        ("12", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_format_rewards(text: str, strict: float, soft: float, count: float) -> None:
    """The shell whole, anywhere, and tag by tag."""
    assert strict_format_reward_func(completions(text)) == [strict]
    assert soft_format_reward_func(completions(text)) == [soft]
    assert xmlcount_reward_func(completions(text)) == [pytest.approx(count, abs=1e-12)]


@given(st.lists(tagged_texts, max_size=4))
def test_rewards_keep_their_range(texts: list[str]) -> None:
    """One value per completion, within the reward's range, the same for a text alone as among others."""
    for name, function in REWARDS.items():
        low, high = RANGES[name]
        values = function(completions(*texts), answer=["12"] * len(texts), other=[None] * len(texts))
        assert len(values) == len(texts)
        assert all(value is not None and low <= value <= high for value in values)
        assert values == [function(completions(text), answer=["12"])[0] for text in texts]


@given(reasoning=contents, answer=contents, gap=blanks, around=blanks)
def test_the_shell_earns_all_and_each_tag_counts(reasoning: str, answer: str, gap: str, around: str) -> None:
    """Whatever its parts hold, the shell earns every format reward in full; without a tag, one pair's."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    text = f"{around}<reasoning>{reasoning}</reasoning>{gap}<answer>{answer}</answer>{around}"
    for function in (strict_format_reward_func, soft_format_reward_func, xmlcount_reward_func):
        assert function(completions(text)) == [0.5]
    for tag in tags:
        broken = completions(text.replace(tag, ""))
        assert strict_format_reward_func(broken) == soft_format_reward_func(broken) == [0.0]
        assert xmlcount_reward_func(broken) == [0.25]


@pytest.mark.parametrize(
    "unit",
    [
        *("<answer>", "</answer>", "<reasoning>", "</reasoning>", "</reasoning> ", "<answer></answer>"),
        *("<reasoning></reasoning><answer>", "1", "1,234,", " ", "<"),
    ],
)
def test_hostile_texts_take_linear_time(unit: str) -> None:
    """A megabyte of repeats, bare or inside an answer, takes all five under a second of the thread's time."""
    text = unit * (1_000_000 // len(unit))
    start = time.thread_time()
    for function in REWARDS.values():
        function(completions(text, f"<answer>{text}</answer>"), answer=["12", "12"])
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k_answers_are_numbers(split: str, count: int) -> None:
    """Every gold answer of the real data parses, and a completion that states it is right."""
    path = GSM8K / f"{split}.jsonl"
    if not path.is_file():
        pytest.skip("the GSM8K files are not here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
    assert len(golds) == count
    assert [gold for gold in golds if parse_number(gold) is None] == []
    spelled = completions(*(f"<answer>{gold.replace(',', '')}.0</answer>" for gold in golds))
    assert set(correctness_reward_func(spelled, answer=golds)) == {2.0}
