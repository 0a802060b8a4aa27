"""Reads, checks and cleans conversations from a column or a file of prompts."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runners.config.sections import DataConfig
from runners.data.row_files import SUFFIXES, Row, read_file
from runners.errors import UserError, did_you_mean, listed, show, user_errors

Message = dict[str, Any]  # keys: role, content; an assistant's tool_calls, a tool's name
ROLES = ("system", "user", "assistant", "tool")


def prompt_fault(value: Any) -> str:
    """Returns a message if a prompt is neither a text nor a valid list of messages, or an empty
    string if it is valid.
    """
    if isinstance(value, str):
        return "" if value.strip() else "is blank"
    if not isinstance(value, list | tuple) or not value:
        return f"expected a text or a list of messages, found {type(value).__name__}"
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            return f"message {number}: expected a role of {', '.join(ROLES)}, found {show(role)}"
        content = message.get("content")
        if isinstance(content, list) and content and all(map(_is_text_part, content)):
            continue
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"message {number}: expected text as its content, found {type(content).__name__}"
    if value[-1]["role"] == "assistant":
        return "ends with the assistant's turn, which the model must write"
    return ""


def prompt_of(row: Mapping[str, Any], config: DataConfig) -> Any:
    """Returns a row's prompt, unchecked. The assistant's last turn is left out if that turn is the
    reference completion.
    """
    value: Any = row.get(config.prompt or config.question)
    return (
        value[:-1] if config.completion == config.prompt and gold_turn(value) is not None else value
    )


def gold_turn(value: Any) -> str | None:
    """Returns the assistant's text if a list of messages ends with the assistant's turn, otherwise
    None.
    """
    last = value[-1] if isinstance(value, list | tuple) and value else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return None
    content = _cleaned(last)["content"] if prompt_fault([{**last, "role": "user"}]) == "" else None
    return content or None


def conversation(value: Any, system: str = "") -> tuple[Message, ...]:
    """Returns the messages of a valid prompt. `system`, if not blank, is added if the prompt has no
    system message.

    Each content becomes a single text. Keys without a value, which Arrow adds, are removed, because
    a template may treat a `tool_calls` of None as calls.
    """
    found = (
        ({"role": "user", "content": value},)
        if isinstance(value, str)
        else tuple(map(_cleaned, value))
    )
    if not system.strip() or found[0]["role"] == "system":
        return found
    return ({"role": "system", "content": system}, *found)


def _cleaned(message: Mapping[str, Any]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {**_without_none(message), "content": content}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def read_prompts(
    name: str, column: str, system: str = "", option: str = "--prompts"
) -> list[list[Message]]:
    """Reads a file's conversations, none of which ends with the assistant's turn.

    `name` is a .txt file with one prompt per non-blank line, "-" for such lines on standard input,
    or a file of rows, whose `column` contains a text or a list of messages. `system` is the first
    message of every conversation; the messages must not contain another one. `option` is the
    command-line option that error messages name. Raises UserError for a row that is not a prompt
    (with its line), and for a file without prompts.
    """
    path = Path(name).expanduser()
    if name != "-" and path.suffix.lower() in SUFFIXES:
        rows = read_file(path)
    else:
        with user_errors(f"{option} {name}: cannot be read as text", OSError, UnicodeDecodeError):
            text = sys.stdin.read() if name == "-" else path.read_text(encoding="utf-8-sig")
        rows = [Row({column: line.strip()}, name) for line in text.split("\n") if line.strip()]
    found = []
    for row in rows:
        value: Any = row.get(column)
        fault = row.fault or prompt_fault(value)
        if not row.fault and column not in row:
            fault = (
                f"no column {show(column)} (--column); found {listed(list(row))}"
                f"{did_you_mean(column, row)}"
            )
        if fault:
            raise UserError(f"{row.place}: {fault}")
        if system.strip() and not isinstance(value, str) and value[0]["role"] == "system":
            raise UserError(
                f"{row.place}: the messages contain a system message, and --system sets a second "
                f"one"
            )
        found.append(list(conversation(value, system)))
    if not found:
        raise UserError(f"{option} {name}: the file contains no prompts")
    return found
