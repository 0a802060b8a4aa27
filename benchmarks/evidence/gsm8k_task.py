"""The solutions and a reward for `gsm8k`, in a separate file, because a process for rewards loads
only this file.
"""

from __future__ import annotations

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
