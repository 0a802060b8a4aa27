"""Fills places on pages, between <!-- NAME:begin --> and <!-- NAME:end -->."""

from __future__ import annotations

from collections.abc import Mapping

from runners.errors import UserError


def filled(page: str, text: str, contents: Mapping[str, str]) -> str:
    """A page's text with each content, by name, in its place. Raises UserError if a place is
    missing.
    """
    for name, content in contents.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise UserError(f"{page}: expected {begin} and, after it, {end}")
        text = f"{head}{begin}\n{content}\n{end}{tail}"
    return text
