"""Writes values as TOML, with a TOML library, so a value's text cannot become a key, a table or a
comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from runners.errors import ESCAPED, UserError, printable, show

Tables = Mapping[str, Mapping[str, Any]]
_NO_NOTES: Mapping[tuple[str, str], str] = MappingProxyType({})


def toml_text(
    tables: Tables, notes: Mapping[tuple[str, str], str] = _NO_NOTES, heading: str = ""
) -> str:
    """The tables of values as a TOML document. `notes`, by table and key, and `heading` become
    comments.

    Raises UserError for a text with half of a surrogate pair, which TOML cannot represent.
    """
    import tomlkit

    document = tomlkit.document()
    if heading:
        document.add(tomlkit.comment(printable(heading)))
        document.add(tomlkit.nl())
    for name, values in tables.items():
        table = tomlkit.table()
        for key, value in values.items():
            if value is None:  # TOML has no such value: the key is left out
                continue
            item = _item(value)
            note = notes.get((name, key))
            if note:
                item.comment(printable(note))
                item.trivia.comment_ws = "  "
            table.add(key, item)
            _check(f"{name}.{key}", item.as_string())
        document.add(name, table)
    return tomlkit.dumps(document).translate(ESCAPED)


def _item(value: Any) -> Any:
    """A value on one line, with inline tables."""
    import tomlkit

    if isinstance(value, Mapping):
        inline = tomlkit.inline_table()
        for key, part in value.items():
            inline.append(key, _item(part))
        return inline
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        for part in value:
            array.append(_item(part))
        return array
    return tomlkit.item(value)


def _check(key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{key}: expected text that UTF-8 can represent, found {show(printable(text))}"
        ) from error
