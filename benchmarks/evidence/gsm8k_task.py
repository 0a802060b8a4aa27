"""The prompt and the lenient reward of `gsm8k`, alone in a file: a process for rewards loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runners.answers.forms import answer_form

SYSTEM = "Solve the problem step by step. End with a line of #### and the final number."
QUESTION = (
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. Each loaf costs $3. "
    "How much money does she earn that day?"
)
SOLUTION = (
    "In the afternoon she sells 12 * 2 = 24 loaves.\n"
    "In the whole day she sells 12 + 24 = 36 loaves.\n"
    "She earns 36 * 3 = 108 dollars.\n"
    "#### 108"
)


def with_example(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a prompt that shows one solved problem: without it the model never writes ####."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": SOLUTION},
        {"role": "user", "content": row["question"]},
    ]
    return {**row, "prompt": messages}


def last_number_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last number of a completion is the reference answer, else 0."""
    form = answer_form("last_number")
    assert form is not None
    texts = [completion[-1]["content"] for completion in completions]
    return [float(form.is_right(text, gold)) for text, gold in zip(texts, answer, strict=True)]
