"""Tables of texts that each form of answers reads or refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from runners.answers.forms import answer_form
from runners.rewards.judge import read_mark

TABLES = Path(__file__).parent / "tables"


def cases_of(name: str) -> dict[str, list[tuple[str, str]]]:
    """The right and the wrong texts of a table, each with its reference answer."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()[1:]:
        if " | " not in line:
            cases = found.setdefault(line, [])
            continue
        reference, _, text = line.partition(" | ")
        cases.append((reference, text.replace("⏎", "\n")))
    return found


@pytest.mark.parametrize("name", ["xml", "last_number", "boxed", "gsm8k", "letter", "json", "exact"])
def test_the_table_of_a_form(name):
    """A form finds the reference answer in at least 60 right texts, and not in at least 60 wrong texts."""
    form: Any = answer_form("json:x" if name == "json" else name)
    cases = cases_of(name)
    misjudged = [
        (kind, reference, text, form.read(text))
        for kind, texts in cases.items()
        for reference, text in texts
        if form.is_right(text, reference) != (kind == "right")
    ]
    assert misjudged == []
    assert [len({*texts}) >= 60 for texts in cases.values()] == [True, True]


def test_the_table_of_a_judge_s_marks():
    """The mark is read from right texts, and not from wrong texts."""
    cases = cases_of("judge")
    replies = {
        text: json.dumps({"choices": [{"message": {"content": text}}]})
        for texts in cases.values()
        for _, text in texts
    }
    misjudged = [
        (kind, mark, text)
        for kind, texts in cases.items()
        for mark, text in texts
        if (read_mark(replies[text], (0.0, 10.0)) == float(mark) / 10) != (kind == "right")
    ]
    assert misjudged == []
    assert [len({*texts}) >= 60 for texts in cases.values()] == [True, True]
