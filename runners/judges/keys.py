"""Keys of APIs: read once from the environment, and then removed from it."""

from __future__ import annotations

import os

_TAKEN: dict[str, str] = {}


def take_key(variable: str) -> str | None:
    """The key in a variable of the environment, None if there is none.

    The variable is removed from this process's environment, so that processes started later do not get it.
    Later calls return the key from memory.
    """
    found = os.environ.pop(variable, "").strip()
    if found:
        _TAKEN[variable] = found
    return _TAKEN.get(variable)
