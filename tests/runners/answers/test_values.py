"""Comparison of answers: exact values, units, shares, LaTeX, and other texts."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.answers.values import answers_agree, parse_number


@pytest.mark.parametrize(
    ("value", "spellings"),
    [
        (1234, ("1234", "1,234", "$1234", "1234.0", "1\u202f234", "$ 1,234", "1234 dollars", "\\$1{,}234")),
        (Fraction("1234567.5"), ("1,234,567.50", "1\u00a0234\u00a0567.5")),
        (-5, ("-5", "\u22125", "\u20135", "-$5", "$-5", "- 5", "-5 \u20ac", "x = -5", "**-5**")),
        (5, ("+5", "5 €", "$5$", "5.", "5 apples.", "5km", "5 km", "$5 per hour", "5\\text{ cm}", "5.0e0")),
        (Fraction(1, 2), (".5", "1/2", "2 / 4", "0.5", "\\frac{1}{2}", "$\\dfrac12$", "0.5 hours")),
        (Fraction(3, 2), ("1 1/2", "1.5", "\\(1.5\\)", "3/2")),
        (50, ("50%", "50 %.", "50\\%", "50 percent", "050")),
        (12_000_000, ("12 million", "$12 million", "12,000,000 people")),
        (24, ("2 dozen eggs", "24°", "24^\\circ", "2.4e1")),
    ],
)
def test_every_spelling_has_its_exact_value(value, spellings) -> None:
    """Signs, currencies, thousands, decimals, fractions, units, scales and LaTeX are read exactly."""
    assert [parse_number(text) for text in spellings] == [value] * len(spellings)


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "-", "$", "%", "5..", "1.2.3", "--5", "-$-5", "1,23", "1,2345", "0,123", "1,234\u202f567"),
        *("12 apples and 3", "18 or 19", "18 is wrong", "12 5", "12 3456", "x", "twelve", "5=5", "<5>"),
        *("1/0", "1/2/3", "1/-2", "nan", "inf", "1e9999", "0x10", "1_000", "1" * 401, "2x", "2 pi"),
        *("\u0661\u0662", "\uff11", "\u00bd", "3abc"),
    ],
)
def test_what_is_not_one_number_is_a_text(text: str) -> None:
    """Several numbers, wrong groups, other digits and letters as factors are not numbers."""
    assert parse_number(text) is None


@given(st.integers(-(10**30), 10**30), st.integers(0, 6))
def test_spellings_of_one_number_agree(digits: int, places: int) -> None:
    """A decimal is equal in all spellings: grouped, with a currency sign, a unit, zeros or spaces."""
    value = Fraction(digits, 10**places)
    sign, size = ("-" if digits < 0 else ""), abs(digits)
    whole, rest = divmod(size, 10**places)
    tail = f".{rest:0{places}d}" if places else ""
    plain, grouped = f"{whole}{tail}", f"{whole:,}{tail}"
    spellings = [f"{sign}{plain}", f"{sign}${grouped}", f"${sign}{plain}", f"{sign}{plain}."]
    spellings += [f"{sign}{grouped} m", f" {sign}{whole}{tail or '.'}00\n", f"{sign}{size}/{10**places}"]
    assert [parse_number(text) for text in spellings] == [value] * len(spellings)


@given(st.text(max_size=150))
def test_any_text_can_be_read(text: str) -> None:
    """No text raises, and spaces around a number do not matter."""
    assert parse_number(f"\n {text} ") == parse_number(text)
    assert answers_agree(text, text)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        *(("18 dollars", "18", True), ("$18", "18 dollars", True), ("18 dollars", "18 euros", False)),
        *(("2 kilometres", "2 km", True), ("18 pounds", "18 lbs", True), ("18 pounds", "18 gbps", False)),
        *(("5 km", "5 kilometers", True), ("5 cm", "5 m", False), ("5 cm²", "5 cm", False)),
        *(("50%", "50", True), ("50%", "0.5", True), ("0.5%", "50", False), ("50 cents", "$0.50", True)),
        *(("12 million", "12", False), ("0.1", "0.10000000000000001", False), ("18", "19", False)),
        *((" red ", "red", True), ("red", "Red", False), ("\\text{red}", "red", True), ("1 5", "1 5", True)),
    ],
)
def test_answers_agree(a: str, b: str, expected: bool) -> None:
    """Numbers are compared exactly, units only with units, other texts as texts, in both directions."""
    assert answers_agree(a, b) is answers_agree(b, a) is expected


def test_options_of_texts() -> None:
    """Case and spaces matter unless an option ignores them."""
    assert answers_agree("New York", "new york", ignore_case=True)
    assert answers_agree("a b\nc", "abc", ignore_spaces=True) and not answers_agree("a b", "ab")
