"""The score that a reasoning-gym task gives an answer: the reward of `data.source = "reasoning-gym:TASK"`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runners.answers.forms import ANSWER, ANSWER_END


def task_score(
    completions: Sequence[Sequence[Mapping[str, Any]]], entry: Sequence[Mapping[str, Any]], **_: Any
) -> list[float]:
    """The task's score, 0 to 1, of what each completion has in its last answer tags, or of all of it."""
    texts = [completion[-1]["content"].rpartition(ANSWER)[2] for completion in completions]
    return [
        float(_scorer(each["metadata"]["source_dataset"])(text.partition(ANSWER_END)[0].strip(), each))
        for text, each in zip(texts, entry, strict=True)
    ]


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn  # pyright: ignore[reportMissingImports] (an extra)

    return get_score_answer_fn(task)
