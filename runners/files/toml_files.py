"""Writes values as TOML. A TOML library is used, so a value's text cannot become a key, a table or
a comment.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from runners.errors import ESCAPED, printable


def toml_text(
    tables: Mapping[str, Mapping[str, Any]],
    notes: Mapping[tuple[str, str], str] = MappingProxyType({}),
    heading: str = "",
) -> str:
    """Formats tables of values as a TOML document. `notes`, keyed by table and key, and `heading`
    become comments.
    """
    import tomlkit

    document = tomlkit.document()
    if heading:
        document.add(tomlkit.comment(printable(heading)))
        document.add(tomlkit.nl())
    for name, values in tables.items():
        table = tomlkit.table()
        for key, value in values.items():
            if value is None:  # TOML has no null, so the key is omitted
                continue
            item = _item(value)
            note = notes.get((name, key))
            if note:
                item.comment(printable(note))
                item.trivia.comment_ws = "  "
            table.add(key, item)
        document.add(name, table)
    return tomlkit.dumps(document).translate(ESCAPED)


def _item(value: Any) -> Any:
    """Converts a value to a TOML item on one line, with inline tables."""
    import tomlkit

    if isinstance(value, Mapping):
        inline = tomlkit.inline_table()
        inline.update(value)
        return inline
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(value)
        return array
    return tomlkit.item(value)
