"""Numbers and JSON for the page: short, and without values that JSON cannot hold."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

_LEVEL = 4  # of zlib: level 6 takes nearly three times as long and saves an eighth
_DEEPEST = 50  # of nested values
_DIGITS = 1 << 53  # whole numbers below it are exact in a browser


def plain_number(value: Any) -> float | int | None:
    """A number with seven significant digits, whole ones exact; None for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) < _DIGITS:
        return value
    try:
        return float(f"{value:.7g}") if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def plain_numbers(values: Sequence[Any]) -> list[float | int | None]:
    """`plain_number` of each value."""
    if set(map(type, values)) == {float}:  # the usual case in a large file: twice as fast
        isfinite = math.isfinite
        return [float(f"{value:.7g}") if isfinite(value) else None for value in values]
    return [plain_number(value) for value in values]


def packed(value: Any) -> bytes:
    """A value as JSON, deflated; null for numbers that are not finite, and for what is nested deep."""
    try:
        text = _dumps(value)
    except (ValueError, RecursionError):  # of a foreign run
        text = _dumps(_plain_part(value, _DEEPEST))
    return zlib.compress(text.encode("utf-8", "backslashreplace"), _LEVEL)  # a lone surrogate: its escape


_dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _plain_part(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_part(each, depth - 1) for key, each in value.items()} if depth else None
    if isinstance(value, list | tuple):
        return [_plain_part(each, depth - 1) for each in value] if depth else None
    return None if isinstance(value, float) and not math.isfinite(value) else value
