"""Text rewards for answers written as ``<reasoning>…</reasoning><answer>…</answer>``.

Each reward is a plain function ``f(completions, **columns) -> list[float | None]``. ``completions`` holds one
conversation per completion, ``[[{"role": "assistant", "content": text}], …]``; a column holds one entry per
completion. ``None`` in the result means that the reward does not apply to that completion. Names, values and
the call convention are those of the MLX-GRPO project (and of TRL's reward functions).

Everything here takes time linear in the text: a policy writes these texts, and it will find the input on
which a backtracking pattern takes exponential time.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from runners.data.value_text import value_text

Completions = Sequence[Sequence[dict[str, str]]]

CORRECT = 2.0
INTEGER = 0.5
STRICT_FORMAT = 0.5
SOFT_FORMAT = 0.5
TAG_PAIR = 0.25
TRAILING_CHARACTER = 0.001

REASONING, REASONING_END = "<reasoning>", "</reasoning>"
ANSWER, ANSWER_END = "<answer>", "</answer>"

_JUNCTION = re.compile(r"</reasoning>\s*<answer>")
# Floats in plain decimals have up to 330; the bound keeps exact arithmetic on a policy's text cheap.
_MAX_NUMBER_CHARACTERS = 400
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
_GROUPED = r"[1-9][0-9]{0,2}(?P<sep>[,\u00a0\u2009\u202f])[0-9]{3}(?:(?P=sep)[0-9]{3})*"
_CURRENCY = r"[$€£¥₹]"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?{_CURRENCY}?\s?(?P<inner_sign>[+-]?)"
    rf"(?:(?P<top>[0-9]+)\s?/\s?(?P<bottom>[0-9]+)"
    rf"|(?P<whole>{_GROUPED}|[0-9]+|(?=\.[0-9]))(?P<decimals>\.[0-9]+)?(?P<exponent>[eE][+-]?[0-9]{{1,3}})?)"
    rf"\s?(?:%|{_CURRENCY})?"
)
_INTEGER = re.compile(r"[+-]?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)")


def answer_text(completion: Sequence[dict[str, Any]]) -> str:
    """The model's last text in a completion: in a conversation with tools, the last turn of the assistant."""
    replies = [message for message in completion if message["role"] == "assistant"]
    return (replies[-1].get("content") or "") if replies else ""


def extract_answer(text: str) -> str | None:
    """The text in the last complete ``<answer>…</answer>``, stripped; None if there is none.

    A pair is an opening tag and the first closing tag after it, with no other opening tag between: an
    unclosed ``<answer>`` is ignored, and of nested ones the innermost counts. An empty pair is no answer.
    """
    last_end = text.rfind(ANSWER_END)
    start = text.rfind(ANSWER, 0, last_end) if last_end >= 0 else -1
    if start < 0:
        return None
    start += len(ANSWER)
    return text[start : text.find(ANSWER_END, start)].strip() or None


def parse_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else; None for any other text.

    Accepted: a sign (``-``, ``+``, the Unicode minus), a currency sign on either side, thousands in groups of
    three (comma, or a thin or no-break space), decimals, an exponent (as a column of floats spells itself), a
    fraction ``a/b``, one full stop at the end, blanks around. ``50%`` is 50: the sign is a unit, as ``$`` is.

    Refused: a unit *word* (``18 dollars``, ``12 million``, ``5 cents``: the word can change the value),
    several numbers, wrong groups (``1,23``), mixed numbers (``1 1/2``), a zero denominator, digits other than
    0–9, ``nan`` and ``inf``, anything over 400 characters.
    """
    text = text.strip()
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    text = text.translate(_MINUS_SIGNS)
    match = _NUMBER.fullmatch(text.removesuffix("."))
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    if match["top"] is not None:
        bottom = int(match["bottom"])
        size = Fraction(int(match["top"]), bottom) if bottom else None
    else:
        whole = re.sub(r"[^0-9]", "", match["whole"]) or "0"
        size = Fraction(whole + (match["decimals"] or "") + (match["exponent"] or ""))
    if size is None:
        return None
    return -size if "-" in (match["sign"], match["inner_sign"]) else size


def numbers_equal(a: object, b: object) -> bool:
    """Whether two answers agree: exactly as numbers if both are numbers, else as stripped text.

    Each may be a text or a number (of an int or float column). None agrees with nothing.
    """
    if a is None or b is None:
        return False
    text_a, text_b = value_text(a), value_text(b)
    x, y = parse_number(text_a), parse_number(text_b)
    if x is not None and y is not None:
        return x == y
    return text_a.strip() == text_b.strip()


def correctness_reward_func(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """2.0 if the extracted answer agrees with the gold ``answer``, else 0.0; None if the gold answer is None.

    Raises ValueError if the two lists differ in length.
    """
    if len(answer) != len(completions):
        raise ValueError(
            f"answer: expected {len(completions)} entries, one a completion, found {len(answer)}"
        )
    return [
        None if gold is None else CORRECT * numbers_equal(extract_answer(text), gold)
        for text, gold in zip(_texts(completions), answer, strict=True)
    ]


def int_reward_func(completions: Completions, **_: Any) -> list[float | None]:
    """0.5 if the extracted answer is a bare integer (``12``, ``-5``, ``1,234``), else 0.0.

    ``$12``, ``12.0`` and ``12.`` have the value of an integer but are not written as one: 0.0.
    """
    answers = [extract_answer(text) for text in _texts(completions)]
    return [
        INTEGER * (answer is not None and bool(_INTEGER.fullmatch(answer.translate(_MINUS_SIGNS))))
        for answer in answers
    ]


def strict_format_reward_func(completions: Completions, **_: Any) -> list[float | None]:
    """0.5 if the whole text is ``<reasoning>…</reasoning> <answer>…</answer>``, else 0.0.

    Each of the four tags must occur once, with only white space between and around the two pairs.
    """
    return [STRICT_FORMAT * _is_shell(text.strip()) for text in _texts(completions)]


def soft_format_reward_func(completions: Completions, **_: Any) -> list[float | None]:
    """0.5 if ``<reasoning>…</reasoning> <answer>…</answer>`` is anywhere in the text, else 0.0.

    Only white space may be between the two pairs; anything may be around and inside them.
    """
    return [SOFT_FORMAT * _holds_shell(text) for text in _texts(completions)]


def xmlcount_reward_func(completions: Completions, **_: Any) -> list[float | None]:
    """0.25 for a complete ``<reasoning>`` pair and 0.25 for a complete ``<answer>`` pair, less a penalty.

    A kind counts once however often it is repeated. The penalty is 0.001 for each character after the last
    ``</answer>``, white space at the ends left out. The result lies within 0.0 and 0.5.
    """
    return [_count_tags(text) for text in _texts(completions)]


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    function.__name__: function
    for function in (
        correctness_reward_func,
        int_reward_func,
        strict_format_reward_func,
        soft_format_reward_func,
        xmlcount_reward_func,
    )
}


def _texts(completions: Completions) -> list[str]:
    return [answer_text(completion) for completion in completions]


def _is_shell(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in (REASONING, REASONING_END, ANSWER, ANSWER_END)):
        return False
    return text.startswith(REASONING) and text.endswith(ANSWER_END) and _JUNCTION.search(text) is not None


def _holds_shell(text: str) -> bool:
    # The first match of each part leaves the most room for the next parts, so backtracking is never needed.
    start = text.find(REASONING)
    junction = _JUNCTION.search(text, start + len(REASONING)) if start >= 0 else None
    return junction is not None and text.find(ANSWER_END, junction.end()) >= 0


def _count_tags(text: str) -> float:
    pairs = _has_pair(text, REASONING, REASONING_END) + _has_pair(text, ANSWER, ANSWER_END)
    _, closing, trailing = text.rpartition(ANSWER_END)
    penalty = TRAILING_CHARACTER * len(trailing.strip()) if closing else 0.0
    return min(max(TAG_PAIR * pairs - penalty, 0.0), 0.5)


def _has_pair(text: str, opening: str, closing: str) -> bool:
    start = text.find(opening)
    return start >= 0 and text.find(closing, start + len(opening)) >= 0
