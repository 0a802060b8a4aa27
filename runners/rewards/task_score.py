"""The score that a reasoning-gym task gives an answer: the reward of `data.source = "reasoning-gym:TASK"`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_START, _END = "<answer>", "</answer>"


def task_score(
    completions: Sequence[Sequence[Mapping[str, Any]]], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float]:
    """The task's score, 0 to 1, of what each completion has in its last answer tags, or of all of it."""
    return [
        float(_scorer(each["metadata"]["source_dataset"])(_answer(completion[-1]["content"]), each))
        for completion, each in zip(completions, entry, strict=True)
    ]


def _answer(text: str) -> str:
    tagged = text.rpartition(_START)[2] if _START in text else text
    return tagged.partition(_END)[0].strip()


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn  # pyright: ignore[reportMissingImports] (an extra)

    return get_score_answer_fn(task)
