"""Keys of APIs: read from the environment once, and gone from it then."""

from __future__ import annotations

import os

_TAKEN: dict[str, str] = {}


def take_key(variable: str) -> str | None:
    """The key in a variable of the environment, None where there is none.

    The variable is removed from this process's environment, so that no process that is started from now on
    gets it. Later calls have the key from memory.
    """
    found = os.environ.pop(variable, "").strip()
    if found:
        _TAKEN[variable] = found
    return _TAKEN.get(variable)
