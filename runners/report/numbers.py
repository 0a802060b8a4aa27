"""Numbers and JSON as the page gets them: short, and without what JSON cannot hold."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

_LEVEL = 4  # of zlib: 6 takes nearly three times as long for an eighth less
_DIGITS = 1 << 53  # whole numbers below it are exact in a browser


def plain_number(value: Any) -> float | int | None:
    """A number with seven significant digits; None for what is no finite number."""
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
        return _json(values)
    if kinds == {float}:  # the usual column of a large file: several times faster than one by one
        isfinite = math.isfinite
        return "[" + ",".join([f"{value:.7g}" if isfinite(value) else "null" for value in values]) + "]"
    return _json([plain_number(value) for value in values])


def packed(value: Any) -> bytes:
    """A value as JSON, deflated (zlib's format)."""
    return _deflated(_json(value))


def packed_columns(columns: Mapping[str, Sequence[Any] | Mapping[str, Sequence[Any]]]) -> bytes:
    """Columns of numbers, and tables of such, as `packed` would do it with `plain_number` of each."""
    return _deflated(_columns(columns))


def _columns(columns: Mapping[str, Any]) -> str:
    cells = (
        f"{_json(name)}:{_columns(values) if isinstance(values, Mapping) else plain_numbers(values)}"
        for name, values in columns.items()
    )
    return "{" + ",".join(cells) + "}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _deflated(text: str) -> bytes:
    # A lone surrogate becomes its JSON escape.
    return zlib.compress(text.encode("utf-8", "backslashreplace"), _LEVEL)
