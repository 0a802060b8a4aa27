"""Prompts from files: one per line, or a column of rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.data.row_files import SUFFIXES, RawRow, read_file
from runners.errors import UserError, did_you_mean, listed, show
from runners.tokenization.chat_format import SPEAKERS

if TYPE_CHECKING:
    # Importing it would import MLX: `grpo generate` reads its prompts before the BLAS is loaded.
    from runners.data.prompts import Message


def read_prompts(name: str, column: str, system: str = "") -> list[list[Message]]:
    """The conversations of a file, each ending with a user's message.

    Args:
        name: a .txt file with a prompt on each line that is not blank, "-" for such lines on standard input,
            or a .jsonl, .json, .csv or .parquet file.
        column: of rows; it holds a text, or a list of messages with roles and contents.
        system: the system message of every conversation; messages must not have one as well.

    Raises UserError, with the line, for a row that is not a prompt, and for a file without prompts.
    """
    path = Path(name).expanduser()
    if name == "-":
        found = [line.strip() for line in sys.stdin if line.strip()]
        prompts = [_messages(text, "standard input", system) for text in found]
    elif path.suffix.lower() in SUFFIXES:
        if not path.is_file():
            raise UserError(f"--prompts {name}: there is no such file")
        prompts = [_messages(_value(row, column), row.place, system) for row in read_file(path)]
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts {name}: cannot be read as text ({error})") from error
        prompts = [_messages(line.strip(), name, system) for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts {name}: there is no prompt in it")
    return prompts


def _value(row: RawRow, column: str) -> Any:
    if row.fault:
        raise UserError(f"{row.place}: {row.fault}")
    if column not in row.values:
        raise UserError(
            f"{row.place}: no column {show(column)} (--column); found {listed(list(row.values))}"
            f"{did_you_mean(column, row.values)}"
        )
    return row.values[column]


def _messages(value: Any, place: str, system: str) -> list[Message]:
    start: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    if isinstance(value, str) and value.strip():
        return [*start, {"role": "user", "content": value}]
    if not isinstance(value, list) or not all(_is_message(message) for message in value):
        raise UserError(
            f"{place}: expected a text or a list of messages with role and content, found {show(value)}"
        )
    if not value or value[-1]["role"] != "user":
        raise UserError(f"{place}: the last message is not the user's, so there is nothing to answer")
    if start and value[0]["role"] == "system":
        raise UserError(f"{place}: the messages have a system message, and --system gives another")
    return [*start, *({"role": each["role"], "content": each["content"]} for each in value)]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in SPEAKERS and isinstance(value.get("content"), str)
