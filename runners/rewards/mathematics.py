"""Compares two texts as mathematics, in a separate process (`library.math_verify_reward`)."""

import logging

# math-verify's own limits need signals of a main thread. They are off, and each call would say so.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def compare(gold: str, answer: str | None, text: str) -> float | None:
    """Returns 1.0 if the answer equals the reference answer, else 0.0. Returns None if the
    reference answer contains no mathematics.

    If `answer` is None, math-verify looks for it in the whole text.
    """
    from math_verify import verify

    wanted = _expression(gold)
    if not wanted:
        return None
    given = _parsed(text) if answer is None else _expression(answer)
    return float(bool(given) and verify(wanted, given, timeout_seconds=None))


def _expression(text: str) -> list:
    """Returns the expressions in a bare answer; the list is empty if there are none."""
    # math-verify reads expressions such as (x+1)^2 completely only if marked as mathematics.
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    return _parsed(marked) or _parsed(text)


def _parsed(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


compare("1/2", "0.5", "")  # fills caches that forked processes inherit
