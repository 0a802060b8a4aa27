"""Untrusted JSON files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from runners.errors import UserError
from runners.files.line_files import open_file


def read_json(file: Path) -> dict:
    """The JSON object in a regular file. Raises UserError if there is none."""
    try:
        with open_file(file, follow=True) as stream:
            content = json.loads(stream.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: found {type(content).__name__}, wanted a JSON object")
    return content


def finite_number(value: Any) -> float | None:
    """A value of such a file as a finite number; None if it is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that float64 cannot hold
        return None


def whole_number(value: Any) -> int:
    """A value of such a file as a count; 0 if it is none."""
    return value if type(value) is int and 0 < value < 2**63 else 0
