"""Provides the built-in rewards: for a right answer, and for the format
``<reasoning>…</reasoning><answer>…</answer>``.

Each reward is a plain function ``f(completions, **columns) -> list[float | None]``. ``completions``
contains one conversation per completion, ``[[{"role": "assistant", "content": text}], …]``; a
column contains one entry per completion. ``None`` in the result means that the reward does not
apply to that completion. Names, values and the call convention are the same as in the MLX-GRPO
project (and in TRL's reward functions).

All rewards take linear time, because a policy writes these texts and could produce inputs on which
a backtracking pattern takes exponential time.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from runners.answers.forms import (
    ANSWER,
    ANSWER_END,
    REASONING,
    REASONING_END,
    AnswerForm,
    answer_form,
)
from runners.answers.thoughts import TAGS, split_thoughts
from runners.answers.values import value_text
from runners.metrics import ENDED_PROGRAMS

Completions = Sequence[Sequence[dict[str, str]]]
Function = Callable[..., list[float | None]]

CORRECT = 2.0

_JUNCTION = re.compile(r"</reasoning>\s*<answer>")
_INTEGER = re.compile(r"[+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)")


def answer_text(completion: Sequence[dict[str, Any]]) -> str:
    """Returns the model's last text in a completion. In a conversation with tools, this is the last
    assistant turn.
    """
    replies = [message for message in completion if message["role"] == "assistant"]
    return (replies[-1].get("content") or "") if replies else ""


def spoken(completions: Completions, tags: Sequence[str] = TAGS) -> list[str]:
    """Returns each completion's text after its thoughts, or an empty text if the completion was
    truncated inside a thought.
    """
    return [split_thoughts(answer_text(each), tags)[1] or "" for each in completions]


def built_in(form: AnswerForm | None = None) -> dict[str, Function]:
    """Returns the built-in rewards by name, for this answer format. None means ``xml``."""
    form = form or answer_form("xml")
    assert form is not None

    def correctness_reward_func(
        completions: Completions,
        answer: Sequence[Any],
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **_: Any,
    ) -> list[float | None]:
        """Returns 2.0 if the completion's answer equals the reference ``answer``, else 0.0. Returns
        None without a reference answer.

        For a program (`answer.form = "code"`), the reward is 2.0 times the share of tests that the
        program passes. The metric ``programs/ended`` counts programs that reached a time limit.
        """
        both = zip(map(answer_text, completions), answer, strict=True)
        asked = [(form.read(text), value_text(gold)) for text, gold in both if gold is not None]
        scores = iter(
            form.scores(
                [found for found, _ in asked],
                [gold for _, gold in asked],
                report=lambda verdict: log_metric(ENDED_PROGRAMS, verdict.ended),
            )
        )
        return [None if gold is None else CORRECT * next(scores) for gold in answer]

    def int_reward_func(completions: Completions, **_: Any) -> list[float | None]:
        """Returns 0.5 if the completion's answer is a bare integer (``12``, ``-5``, ``1,234``),
        else 0.0.

        ``$12``, ``12.0`` and ``12.`` score 0.0, because their value is an integer but they are not
        written as integers.
        """
        answers = [
            (form.read(text) or "").replace("\u2212", "-") for text in map(answer_text, completions)
        ]
        return [0.5 * bool(_INTEGER.fullmatch(answer)) for answer in answers]

    functions = (
        correctness_reward_func,
        int_reward_func,
        strict_format_reward_func,
        soft_format_reward_func,
        xmlcount_reward_func,
    )
    return {function.__name__: function for function in functions}


def strict_format_reward_func(
    completions: Completions, thought_tags: Sequence[str] = TAGS, **_: Any
) -> list[float | None]:
    """Returns 0.5 if the text after the thoughts is ``<reasoning>…</reasoning>
    <answer>…</answer>``, else 0.0.

    Each of the four tags must occur once, with only white space between and around the two pairs.
    """
    return [0.5 * _is_shell(text.strip()) for text in spoken(completions, thought_tags)]


def soft_format_reward_func(
    completions: Completions, thought_tags: Sequence[str] = TAGS, **_: Any
) -> list[float | None]:
    """Returns 0.5 if ``<reasoning>…</reasoning> <answer>…</answer>`` occurs anywhere after the
    thoughts, else 0.0.

    Only white space may stand between the two pairs. Any text may stand around the pairs and inside
    them.
    """
    return [0.5 * _holds_shell(text) for text in spoken(completions, thought_tags)]


def xmlcount_reward_func(
    completions: Completions, thought_tags: Sequence[str] = TAGS, **_: Any
) -> list[float | None]:
    """Returns 0.25 for a complete ``<reasoning>`` pair plus 0.25 for a complete ``<answer>`` pair,
    minus a penalty.

    Repeated pairs count once. The penalty is 0.001 for each character after the last ``</answer>``,
    except trailing white space. The result is between 0.0 and 0.5.
    """
    return [_count_tags(text) for text in spoken(completions, thought_tags)]


REWARDS = built_in()
"""The rewards for the form ``xml``."""
correctness_reward_func = REWARDS["correctness_reward_func"]
int_reward_func = REWARDS["int_reward_func"]
"""The rewards for answers in tags, which can be imported like the three above."""


def _is_shell(text: str) -> bool:
    return (
        all(text.count(tag) == 1 for tag in (REASONING, REASONING_END, ANSWER, ANSWER_END))
        and text.startswith(REASONING)
        and text.endswith(ANSWER_END)
        and _JUNCTION.search(text) is not None
    )


def _holds_shell(text: str) -> bool:
    # The first match of each part leaves the most text for the next parts, so backtracking is never
    # needed.
    start = text.find(REASONING)
    junction = _JUNCTION.search(text, start + len(REASONING)) if start >= 0 else None
    return junction is not None and text.find(ANSWER_END, junction.end()) >= 0


def _count_tags(text: str) -> float:
    pairs = _has_pair(text, REASONING, REASONING_END) + _has_pair(text, ANSWER, ANSWER_END)
    _, closing, trailing = text.rpartition(ANSWER_END)
    penalty = 0.001 * len(trailing.strip()) if closing else 0.0
    return min(max(0.25 * pairs - penalty, 0.0), 0.5)


def _has_pair(text: str, opening: str, closing: str) -> bool:
    start = text.find(opening)
    return start >= 0 and text.find(closing, start + len(opening)) >= 0
