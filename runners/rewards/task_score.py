"""Scores an answer with its reasoning-gym task: the reward for `data.source =
"reasoning-gym:TASK"`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runners.answers.forms import ANSWER, ANSWER_END
from runners.answers.thoughts import TAGS
from runners.rewards.builtin import spoken


def task_score(
    completions: Sequence[Sequence[dict[str, Any]]],
    entry: Sequence[Mapping[str, Any]],
    thought_tags: Sequence[str] = TAGS,
    **_: Any,
) -> list[float]:
    """Returns the task's score, 0 to 1, for each completion. The scored text is in the last answer
    tags or, without tags, after the thoughts.
    """
    texts = [text.rpartition(ANSWER)[2] for text in spoken(completions, thought_tags)]
    return [
        float(
            _scorer(each["metadata"]["source_dataset"])(text.partition(ANSWER_END)[0].strip(), each)
        )
        for text, each in zip(texts, entry, strict=True)
    ]


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    # an optional dependency
    from reasoning_gym import get_score_answer_fn  # pyright: ignore[reportMissingImports]

    return get_score_answer_fn(task)
