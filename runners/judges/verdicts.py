"""Turns judges' answers into rewards: a score on a scale, a ranking of a group, or a failure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence

from runners.errors import Failure, show
from runners.machine.bounded_process import BoundedFunction

_MOST = 10_000  # characters at the end of an answer that are read
_NUMBER = r"(?>[-+]?(?:\d+(?:\.\d*)?|\.\d+))"  # atomic: no second try with fewer digits
_SCORE = re.compile(rf"\bscore\b[\s*_`\"]*[:=][\s*_`\"]*({_NUMBER})(?![\d.]*\d)", re.IGNORECASE)
_ALONE = re.compile(rf"\s*[*_`\"]*({_NUMBER})[*_`\"]*\s*")
_RANKING = re.compile(r"\branking\b[\s*_`\"]*[:=]([^\n]*)", re.IGNORECASE)
_LIST = re.compile(r"\[([\d,\s]*)\]")


def read_score(answer: str, scale: tuple[float, float], pattern: str = "") -> float | Failure:
    """The score in an answer, as a share of the scale: 0.0 at its low end, 1.0 at its high end.

    It is the last ``SCORE: number``, or the whole answer if that is one number. With `pattern` it is the
    group of the last match. Text up to ``</think>`` is ignored.
    """
    text = _without_thoughts(answer)
    if pattern:
        found = _matches(pattern, text)
        if found is None:
            return Failure("got an answer on which the judge's pattern takes too long", _end_of(text))
    else:
        alone = _ALONE.fullmatch(text)
        found = [alone[1]] if alone else _SCORE.findall(text)
    if not found:
        return Failure("got an answer without a score", _end_of(text))
    low, high = scale
    try:
        score = float(found[-1])
    except (TypeError, ValueError):  # a custom pattern may match anything
        return Failure("got a score that is no number", show(found[-1]))
    if not low <= score <= high:  # NaN neither
        return Failure(f"got a score beyond the scale from {low:g} to {high:g}", f"{score:g}")
    return (score - low) / (high - low)


def matches(pattern: str, text: str) -> list[str | None]:
    """The group of each match."""
    return [match[1] for match in re.finditer(pattern, text)]


# In a process with limits: a pattern with nested repeats may never end, and cannot be interrupted.
_matches = BoundedFunction(f"{__name__}:matches", seconds=2.0, memory=256_000_000)


def read_ranking(answer: str, size: int) -> list[float] | Failure:
    """The rewards of `size` ranked texts, by number: 1.0 for the best, 0.0 for the last, in even steps.

    The ranking is the last ``RANKING: 2, 1, 3``, best first, or else the last list in square brackets. It
    must contain each number from 1 to `size` once.
    """
    text = _without_thoughts(answer)
    found = _RANKING.findall(text) or _LIST.findall(text)
    if not found:
        return Failure("got an answer without a ranking", _end_of(text))
    numbers = [int(digits) for digits in re.findall(r"\d{1,9}", found[-1])]
    if sorted(numbers) != list(range(1, size + 1)):
        return Failure("got a ranking that does not name each number once", show(found[-1].strip()))
    rewards = [math.nan] * size
    for place, number in enumerate(numbers):
        rewards[number - 1] = 1 - place / (size - 1)
    return rewards


def presentation_order(texts: Sequence[str], salt: str) -> list[str]:
    """The different texts among `texts`, in an order that depends only on their content.

    A judge may prefer the first or the last text. So the order does not depend on the texts' places, and is
    the same when a step is repeated.
    """
    return sorted(
        dict.fromkeys(texts),
        key=lambda text: hashlib.sha256(f"{salt}\0{text}".encode("utf-8", "surrogatepass")).digest(),
    )


def _without_thoughts(answer: str) -> str:
    return answer[-_MOST:].rpartition("</think>")[2]


def _end_of(text: str) -> str:
    words = " ".join(text.split())
    return show(words if len(words) <= 60 else f"...{words[-57:]}") if words else "nothing"
