"""Numbers and JSON as the page gets them: short, and without what JSON cannot hold."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

_LEVEL = 6  # of zlib: 9 takes several times longer for a few per cent


def plain_number(value: Any) -> float | int | None:
    """A number with seven significant digits; None for what is no finite number."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else float(f"{value:.6e}") if abs(value) < 10**300 else None
    if not math.isfinite(value):
        return None
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def packed(value: Any) -> bytes:
    """A value as JSON, deflated (zlib's format)."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate becomes its JSON escape.
    return zlib.compress(text.encode("utf-8", "backslashreplace"), _LEVEL)
