"""A row's values as text: numbers as plain decimals, which every reader understands alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real

_WITH_EXPONENT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,3}")


def value_text(value: object) -> str:
    """The text of a value: 0.00005 for 5e-05 (math-verify reads that as 5·e − 5), 18 for the float 18.0.

    Numbers in lists and tables are written in the same way. A text stays as it is.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_part, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_part(key)}: {_part(item)}' for key, item in value.items())}}}"
    text = without_exponent(str(value))
    if not isinstance(value, Real):
        return text
    return "0" if text == "-0.0" else text.removesuffix(".0")


def without_exponent(text: str) -> str:
    """A text that is a number with an exponent as a plain decimal; any other text as it is."""
    return format(Decimal(text), "f") if _WITH_EXPONENT.fullmatch(text) else text


def _part(value: object) -> str:
    return repr(value) if isinstance(value, str) else value_text(value)
