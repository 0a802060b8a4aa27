"""Provides rewards to use or extend: a comparison of mathematical answers, and a wrapper for
functions on plain texts.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from runners.answers.forms import extract_answer
from runners.answers.thoughts import TAGS
from runners.answers.values import value_text
from runners.errors import UserError
from runners.machine.bounded_process import BoundedFunction
from runners.machine.versions import install_hint
from runners.rewards.builtin import spoken

Rewards = list[float | None]


def math_verify_reward(
    completions: Sequence[Any], answer: Sequence[Any], thought_tags: Sequence[str] = TAGS, **_: Any
) -> Rewards:
    """Returns 1.0 if the answer is mathematically equal to the reference answer, else 0.0. Returns
    None without a reference answer.

    `1/2`, `0.5`, `\\frac{1}{2}` and `\\boxed{\\frac12}` are equal (math-verify, extra `math`). The
    answer is the text in the last <answer>…</answer>, or the answer that math-verify finds after
    the thoughts. The comparison runs in a persistent process, limited to 2 s and 512 MB per
    completion, because a policy may write texts such as 9^(9^9). Beyond these limits the reward is
    None. Raises UserError without math-verify.
    """
    _start_math()
    texts = spoken(completions, thought_tags)
    return [
        None if gold is None else _compare(value_text(gold), extract_answer(text), text)
        for text, gold in zip(texts, answer, strict=True)
    ]


def on_texts(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a reward that was written for plain texts, like TRL's for data without conversations.

    The wrapped reward receives texts as `completions` and the last messages' texts as `prompts`;
    all other arguments are passed unchanged. The result has the wrapped function's name and
    parameters. The wrapped function may be async.
    """

    @functools.wraps(reward)
    def call(**arguments: Any) -> Any:
        for name in {"completions", "prompts"} & arguments.keys():
            arguments[name] = [messages[-1]["content"] for messages in arguments[name]]
        return reward(**arguments)

    return call


def _start_math() -> None:
    """Starts the comparison process in advance, because its imports take a second or two."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(f"math_verify_reward requires math-verify: {install_hint('math')}")
    _compare.start()


_compare = BoundedFunction("runners.rewards.mathematics:compare", seconds=2.0, memory=512_000_000)
# Called before a run loads its model: raises UserError if the reward cannot work.
math_verify_reward.check_ready = _start_math  # pyright: ignore[reportFunctionMemberAccess]
