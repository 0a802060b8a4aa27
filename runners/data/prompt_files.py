"""Prompts from files: one per line, or a column of rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runners.data.messages import Message, conversation, prompt_fault
from runners.data.row_files import SUFFIXES, read_file
from runners.errors import UserError, did_you_mean, listed, show


def read_prompts(name: str, column: str, system: str = "", option: str = "--prompts") -> list[list[Message]]:
    """The conversations of a file, none of which ends with the assistant's turn.

    Args:
        name: a .txt file with a prompt on each line that is not blank, "-" for such lines on standard input,
            or a .jsonl, .json, .csv or .parquet file.
        column: of rows; it holds a text, or a list of messages with roles and contents.
        system: the system message of every conversation; messages must not have one as well.
        option: what named the file, for errors.

    Raises UserError, with the line, for a row that is not a prompt, and for a file without prompts.
    """
    found = []
    for place, value in _values(name, column, option):
        if fault := prompt_fault(value):
            raise UserError(f"{place}: {fault}")
        if system.strip() and not isinstance(value, str) and value[0]["role"] == "system":
            raise UserError(f"{place}: the messages have a system message, and --system gives another")
        found.append(list(conversation(value, system)))
    if not found:
        raise UserError(f"{option} {name}: there is no prompt in it")
    return found


def _values(name: str, column: str, option: str) -> Iterator[tuple[str, Any]]:
    """Each prompt with its place."""
    path = Path(name).expanduser()
    if name != "-" and not path.is_file():
        raise UserError(f"{option} {name}: there is no such file")
    if path.suffix.lower() not in SUFFIXES:
        try:
            text = sys.stdin.read() if name == "-" else path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{option} {name}: cannot be read as text ({error})") from error
        yield from ((name, line.strip()) for line in text.split("\n") if line.strip())
        return
    for row in read_file(path):
        if row.fault:
            raise UserError(f"{row.place}: {row.fault}")
        if column not in row:
            raise UserError(
                f"{row.place}: no column {show(column)} (--column); found {listed(list(row))}"
                f"{did_you_mean(column, row)}"
            )
        yield row.place, row[column]
