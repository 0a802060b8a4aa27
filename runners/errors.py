"""Errors that a person can act on. The command line shows them as lines on stderr and exits with code 2."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_SHOWN = 80  # characters of a found value that fit into a one-line message


class UserError(Exception):
    """Something outside the program has to change: bad data, a bad model folder, a bad reward, a full disk.

    The message is one line that names the thing, what was found and what is wanted.
    """


class ConfigError(UserError):
    """A config that cannot be used. `problems` holds one line for each fault, in the order of the file."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(_printable(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelled most like `name`, or None where none is close."""
    if len(name) > _SHOWN:
        return None
    lowered = {candidate.lower(): candidate for candidate in known}
    match = get_close_matches(name.lower(), lowered, n=1)
    return lowered[match[0]] if match else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known name, or the empty string."""
    match = nearest(name, known)
    return f"; did you mean {match}?" if match else ""


def show(value: object) -> str:
    """A found value as TOML spells it, shortened to fit into a one-line message."""
    text = spell(value, depth=3)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def spell(value: object, depth: int = 20) -> str:
    """A value as TOML spells it, inline; what is nested deeper than `depth` becomes an ellipsis."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple | dict) and depth == 0:
        return "..."
    if isinstance(value, list | tuple):
        return "[" + ", ".join(spell(item, depth - 1) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {spell(item, depth - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        # Python refuses to spell integers of more than 4,300 digits.
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def _printable(line: str) -> str:
    """`line` without line breaks or terminal escapes, which a quoted TOML key may bring."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
