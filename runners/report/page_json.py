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
    """A number with seven significant digits; None for a value that is not a finite number."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < _DIGITS else float(f"{value:.6e}") if abs(value) < 10**300 else None
    if not math.isfinite(value):
        return None
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def plain_numbers(values: Sequence[Any]) -> str:
    """`plain_number` of each value, as the text of a JSON array."""
    kinds = set(map(type, values))
    if kinds == {int} and min(values) > -_DIGITS and max(values) < _DIGITS:
        return plain_json(values)
    if kinds == {float}:  # the usual case in a large file: several times faster than one by one
        isfinite = math.isfinite
        return "[" + ",".join([f"{value:.7g}" if isfinite(value) else "null" for value in values]) + "]"
    return plain_json([plain_number(value) for value in values])


def packed(value: Any) -> bytes:
    """A value as JSON, deflated."""
    return deflated(plain_json(value))


def columns_json(columns: Mapping[str, Sequence[Any] | Mapping[str, Sequence[Any]]]) -> str:
    """Columns of numbers, and tables of such, as JSON, with `plain_number` of each."""
    cells = [f"{plain_json(name)}:{_column_json(values)}" for name, values in columns.items()]
    return "{" + ",".join(cells) + "}"


def _column_json(values: Sequence[Any] | Mapping[str, Sequence[Any]]) -> str:
    return columns_json(values) if isinstance(values, Mapping) else plain_numbers(values)


def plain_json(value: Any) -> str:
    """A value as JSON without spaces; null for numbers that are not finite, and for what is nested deep."""
    try:
        return _dumps(value)
    except (ValueError, RecursionError):  # of a foreign run
        return _dumps(_plain_part(value, _DEEPEST))


_dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _plain_part(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_part(each, depth - 1) for key, each in value.items()} if depth else None
    if isinstance(value, list | tuple):
        return [_plain_part(each, depth - 1) for each in value] if depth else None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def deflated(text: str) -> bytes:
    """A text in zlib's format, as UTF-8; a lone surrogate becomes its JSON escape."""
    return zlib.compress(text.encode("utf-8", "backslashreplace"), _LEVEL)
