"""The forms of answers: reading, hostile texts, and the form that fits completions."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.answers import forms
from runners.answers.forms import PLACE, SPELLINGS, fitting_form
from runners.errors import UserError

answer_form: Any = forms.answer_form  # not None here
CASE = {"ignore_case": True}
KNOWN = ("xml", "last_number", "boxed", "gsm8k", "letter", "json:x", "exact")
CASES = {
    "xml": [
        *(("<answer>\n 5 \n</answer>", "5"), ("<answer>5</answer> no: <answer>7</answer>", "7")),
        *(("<answer>5</answer> <answer>7", "5"), ("<answer>1 <answer>5</answer></answer>", "5")),
        *(("<answer>5</answer> and </answer>", "5"), ("<answer>5</answer><answer></answer>", None)),
        *(("<answer>", None), ("5</answer> <answer>6", None), ("<answer> </answer>", None), ("", None)),
    ],
    "last_number": [
        *(("The answer is 18 dollars.", "18 dollars"), ("so 1,234.50 total.", "1,234.50"), ("10-5=-5", "-5")),
        *(("10-5", None), ("a 3/4 share", "3/4"), ("$18", "$18"), ("is \\frac{3}{4}.", "3/4")),
        *(("It is 1 1/2.", "1 1/2"), ("so -2 3/4 m", "-2 3/4 m"), ("step 1\n1/2", "1/2"), ("v2 1/2", "1/2")),
        *(("about 12 million", "12 million"), ("x2 7 v1.2.", "7"), ("50 %", "50 %"), ("none", None)),
    ],
    "boxed": [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        *(("\\boxed{5", None), ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"), ("{x} \\boxed{}", None)),
    ],
    "gsm8k": [("x\n#### 18", "18"), ("#### 1\n#### 18 dollars\nmore", "18 dollars"), ("18", None)],
    "letter": [
        *(("B", "B"), ("(b)", "B"), ("The answer is (C).", "C"), ("Answer: D", "D"), ("Answer: b", "B")),
        *(("A car is fast. So B", "B"), ("I think the correct option is A because", "A"), ("C) 18", "C")),
        *(("the answer is a number. It is B.", "B"), ("**Answer:** C", "C"), ("\\boxed{D}", "D")),
        *(("no idea", None), ("I am", None)),
    ],
    "json:x": [
        *(('```json\n{"x": 5, "y": {"z": 1}}\n```', "5"), ('{"y": 1}', None), ('{"x": true}', "true")),
        *(('set {1,2} {"x": " a b "}', "a b"), ('{"x": {"x": 2}}', '{"x": 2}'), ('{"x": null}', None)),
        *(('{"x": 1} {"x": 2}', "2"), ('{"x": 1', None), ('{"x": 1} {"y": 2}', None)),
    ],
    "exact": [(" hi \n", "hi"), ("", None)],
    "regex:is (\\w+)": [("this is good, is bad", "bad"), ("no", None)],
    "regex:\\d+": [("1 and 22", "22")],
}


@pytest.mark.parametrize(
    ("spec", "text", "found"), [(s, *case) for s, cases in CASES.items() for case in cases]
)
def test_what_a_form_reads(spec, text, found):
    """A form reads the last answer, or none."""
    assert answer_form(spec).read(text) == found


@pytest.mark.parametrize("spec", KNOWN)
def test_a_form_reads_its_correct_completion(spec):
    """A form reads the correct completion of `grpo check`, and has an instruction."""
    form, (answer, gold) = answer_form(spec), ("B", "b") if spec == "letter" else ("18", "18")
    assert form.is_right(form.right.replace(PLACE, answer), gold)
    assert form.instruction and form.what and PLACE in form.right
    assert "x" in form.instruction or spec != "json:x"


@given(st.text(max_size=200), st.sampled_from(KNOWN))
def test_every_form_reads_any_text(text, spec):
    """Any text results in None or a non-empty text."""
    assert answer_form(spec).read(text) != ""


@pytest.mark.parametrize("spec", KNOWN)
@pytest.mark.parametrize(
    "unit",
    [
        *("<answer>", "<answer></answer>", "{", '{"x":', "\\boxed{", "}", "1,234", "1", "1 /", "####"),
        *("answer is ", "(", "A ", "-", "\\frac{", ",111", " ", '"', "\\"),
        *("0-", "1 or ", "not ", "Answer: B ", "answer ", "B) ", "</think>", "<think>", "1\n", "$=", "- "),
        "\\boxed",
    ],
)
def test_hostile_texts_take_linear_time(spec, unit):
    """200,000 repeated characters take less than half a second, alone and as an answer."""
    text, form = unit * (200_000 // len(unit)), answer_form(spec)
    start = time.thread_time()
    for each in (text, f"<answer>{text}</answer>", f"answer{text}1"):
        form.is_right(each, "12")
    assert time.thread_time() - start < 0.5


def test_an_endless_pattern_finds_no_answer():
    """The text has no answer; the next text is read."""
    form = answer_form("regex:(a+)+$")
    assert form.read("a" * 5000 + "b") is None and form.read("caa") == "aa"


def test_an_own_function(tmp_path, monkeypatch):
    """The function runs in a process with limits; its error names file and line."""
    monkeypatch.chdir(tmp_path)
    source = "def last(text):\n    return float(text.split()[-1]) if text else None\n"
    (tmp_path / "read.py").write_text(source)
    form = answer_form(f"{tmp_path / 'read.py'}:last")
    assert form.read("it is 4.0") == "4" and form.is_right("so 4", "4.00") and form.read("") is None
    with pytest.raises(UserError, match=r"read.py:last\" failed: line 2: ValueError: could not convert"):
        form.read("no number")


@pytest.mark.parametrize(
    ("spec", "ignored", "text", "gold", "right"),
    [
        *(("letter", {}, "b", "(B)", True), ("exact", {}, "18.0", "18", True)),
        *(("exact", {}, "positive.", "positive", False), ("exact", CASE, "Positive.", "positive", True)),
        ("exact", {**CASE, "ignore_spaces": True}, "New  York", "newyork", True),
        ("boxed", {}, "So $\\boxed{42}$", "First 40, then 2 more: $\\boxed{42}$.", True),
        *(("boxed", {}, "So $\\boxed{42}$", "42", True), ("boxed", {}, "\\boxed{4}", "$\\boxed{2}$", False)),
        ("json:sum", {}, '{"sum": 4, "x": 1}', '{"x": 2, "sum": 4}', True),
        *(("json:sum", {}, '{"sum": 4}', "4", True), ("json:sum", {}, '{"sum": 5}', '{"sum": 4}', False)),
    ],
)
def test_what_is_right_in_a_form(spec, ignored, text, gold, right):
    """Letters ignore case; a reference answer may have the form itself."""
    assert answer_form(spec, **ignored).is_right(text, gold) is right


def test_spellings():
    """All registered forms have a spelling."""
    assert answer_form("none") is None and len(SPELLINGS) == len(forms.FORMS) - 1
    for wrong in ("json", "regex:", "boxed:x", "own", "xlm"):
        with pytest.raises(ValueError, match="one of xml, last_number"):
            answer_form(wrong)


@pytest.mark.parametrize(
    ("texts", "golds", "found"),
    [
        (["The answer is 18.", "so 3", "what"], ["18", "4", "5"], ("last_number", 2, 1)),
        (["It is \\boxed{3}", "\\boxed{4}"], ["3", "4"], ("boxed", 2, 2)),
        (['{"label": "x"}', '{"label": "y", "why": 1}'], ["x", "x"], ("json:label", 2, 1)),
        *((["Answer: B", "C."], ["B", "C"], ("letter", 2, 2)), (["a", "b", "5"], ["1", "2", "3"], None)),
    ],
)
def test_the_form_that_fits_most_completions(texts, golds, found):
    """The form with the most right answers is chosen if half of the completions have it."""
    assert fitting_form(texts, golds) == found
