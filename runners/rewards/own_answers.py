"""A user's function as `answer.form`: called in a process with limits (`runners.answers.forms`)."""

from __future__ import annotations

from typing import Any

from runners.answers.values import value_text
from runners.config.user_functions import function_file, resolve_function
from runners.errors import error_line


def read(name: str, text: str) -> dict[str, Any]:
    """The answer that a function finds in a text, or the line of its fault."""
    try:
        found = resolve_function(name, key="answer.form", takes=["text"])(text)
        return {"answer": None if found is None else value_text(found).strip()}
    except Exception as error:
        return {"error": error_line(error, function_file(name))}
