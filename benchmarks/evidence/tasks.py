"""The solutions and rewards of `gsm8k` and `real_model`; a process for rewards loads only this file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from runners.answers.forms import answer_form

_WORKING = re.compile("<<.*?>>")  # the data's notes for a calculator


def with_solution(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the data's solution as a reference completion, because the model never writes
    #### by itself.
    """
    return {**row, "solution": _WORKING.sub("", row["answer"])}


def last_number_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last number of a completion is the reference answer, else 0."""
    form = answer_form("last_number")
    assert form is not None
    texts = [completion[-1]["content"] for completion in completions]
    return [float(form.is_right(text, gold)) for text, gold in zip(texts, answer, strict=True)]


def one_line_json(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for one line of JSON with a number in `answer`; 0.4 for such an object somewhere, 0.1 for a brace."""
    return [_form(completion[-1]["content"].strip()) for completion in completions]


def _form(text: str) -> float:
    if "{" not in text:
        return 0.0
    inner = text[text.index("{") : text.rfind("}") + 1]
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError):
        return 0.1
    if not isinstance(found, dict) or type(found.get("answer")) not in (int, float):
        return 0.1
    return 1.0 if inner == text and "\n" not in text else 0.4
