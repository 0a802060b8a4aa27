"""Untrusted JSON files."""

from __future__ import annotations

import json
from pathlib import Path

from runners.errors import UserError


def read_json(file: Path) -> dict:
    """The JSON object in a file. Raises UserError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: found {type(content).__name__}, wanted a JSON object")
    return content
