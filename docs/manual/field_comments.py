"""The fields of a class, with the comments beside them, as a list in the manual."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """`beta: float = 0.0  # coefficient of the KL` becomes a line of the class's list of fields."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Adds an `Attributes:` section to the docstring of a public class with fields."""
        fields = [
            member
            for member in cls.members.values()
            if isinstance(member, griffe.Attribute)
            and member.annotation
            and not member.name.startswith("_")
        ]
        fields = [field for field in fields if "property" not in field.labels]
        if not fields or cls.docstring is None or cls.name.startswith("_"):
            return
        lines = [f"    {field.name}: {_described(field)}" for field in fields]
        cls.docstring.value = "\n".join([cls.docstring.value, "", "Attributes:", *lines])


def _described(field: griffe.Attribute) -> str:
    """What the comment behind a field says, and its default."""
    said, default = _comment(field), _default(field)
    text = said if not said or said.endswith(".") else f"{said}."
    return (
        " ".join(part for part in (text, f"Default: `{default}`." if default else "") if part)
        or "Required."
    )


def _default(field: griffe.Attribute) -> str:
    """As the code writes it, also inside of `attrs.field(…)`; empty: there is none."""
    if field.value is None:
        return ""
    value = ast.parse(str(field.value), mode="eval").body
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "_key":
        return ast.unparse(value.args[0])
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        given = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        return ast.unparse(given[0]) if given else ""
    return ast.unparse(value)


def _comment(field: griffe.Attribute) -> str:
    """The meaning in its call of `_key`, or the comment on its last line; empty: there is none."""
    value = ast.parse(str(field.value), mode="eval").body if field.value is not None else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "_key":
        return ast.literal_eval(value.args[1])
    last = field.lines_collection[field.filepath][(field.endlineno or field.lineno or 1) - 1]
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(last.strip()).readline))
    except tokenize.TokenError:  # the last line of a value that goes over several
        return ""
    comments = [
        token.string.lstrip("# ").strip() for token in tokens if token.type == tokenize.COMMENT
    ]
    return (
        ""
        if not comments or comments[-1].startswith(("noqa", "type:", "pyright:"))
        else comments[-1]
    )
