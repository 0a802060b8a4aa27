"""The lenient reward of `gsm8k`, in a file of its own: a process for rewards loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runners.answers.forms import answer_form


def last_number_reward(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last number of a completion is the reference answer, else 0."""
    form = answer_form("last_number")
    assert form is not None
    texts = [completion[-1]["content"] for completion in completions]
    return [float(form.is_right(text, gold)) for text, gold in zip(texts, answer, strict=True)]
