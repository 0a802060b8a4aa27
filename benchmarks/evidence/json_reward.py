"""The reward of `real_model`'s JSON task, in a separate file, because a process for rewards loads
only this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def one_line_json(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for one line of JSON with a number in `answer`; 0.4 for such an object somewhere, 0.1 for a brace."""
    return [_form(completion[-1]["content"].strip()) for completion in completions]


def _form(text: str) -> float:
    if "{" not in text:
        return 0.0
    inner = text[text.index("{") : text.rfind("}") + 1]
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError):
        return 0.1
    if not isinstance(found, dict) or type(found.get("answer")) not in (int, float):
        return 0.1
    return 1.0 if inner == text and "\n" not in text else 0.4
