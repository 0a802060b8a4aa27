"""Parses a model's tool calls: with mlx-lm's parser for the tokenizer, in nanochat's format, or as
JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from runners.errors import error_line

START = "<tool_call>"  # in the plain format
END = "</tool_call>"
# Markers in nanochat's format. The only tool's argument is between the first two, and the tool's
# result is between the last two.
MARKS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")
MAX_CALLS = 64  # maximum number of calls per turn; nothing else limits what a policy writes


@attrs.frozen(eq=False)
class Tool:
    """A tool: its name, its schema for chat templates, and whether it is a coroutine function."""

    name: str
    schema: dict[str, Any]
    is_async: bool


@attrs.frozen(eq=False)
class ToolCall:
    """A parsed tool call, or its error."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""

    def message(self) -> dict[str, Any]:
        """Returns the call as an entry for a message's `tool_calls`, in TRL's form for rewards."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@attrs.frozen(eq=False)
class CallReader:
    """Parses the tool calls in a turn's text."""

    schemas: Sequence[dict[str, Any]]
    parser: Callable[..., Any] | None = None  # mlx-lm's parser; None means the plain format
    start: str = START
    end: str = END  # empty means a call extends to the end of the text

    @classmethod
    def of(
        cls, tokenizer: Any, schemas: Sequence[dict[str, Any]], *, marked: bool = False
    ) -> CallReader:
        """Returns the reader for a tokenizer. If `marked` is True, the reader uses nanochat's
        format, otherwise mlx-lm's parser if the tokenizer has one.
        """
        if marked:
            return cls(schemas, _of_expression, start=MARKS[0], end=MARKS[1])
        parser = getattr(tokenizer, "tool_parser", None)
        start = getattr(tokenizer, "tool_call_start", None)
        if parser is None or not start:
            return cls(schemas)
        return cls(schemas, parser, start, getattr(tokenizer, "tool_call_end", None) or "")

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns the stripped text around a turn's calls, and the calls in order. A call that
        cannot be parsed is returned with an error.
        """
        if self.parser is None and self.start not in text:
            whole = _whole_json(text)
            if whole:
                return "", [whole]
        end = rf"(?:{re.escape(self.end)}|\Z)" if self.end else r"\Z"
        around = []
        calls = []
        place = 0
        for found in re.finditer(f"{re.escape(self.start)}(.*?){end}", text, re.DOTALL):
            if len(calls) >= MAX_CALLS:
                break
            around.append(text[place : found.start()])
            calls += self._parsed(found[1])
            place = found.end()
        return ("".join(around) + text[place:]).strip(), calls[:MAX_CALLS]

    def _parsed(self, body: str) -> list[ToolCall]:
        try:
            found = (
                json.loads(body) if self.parser is None else self.parser(body, list(self.schemas))
            )
        except Exception as error:  # a parser may raise any error for text that a policy wrote
            return [ToolCall("", {}, f"the tool call cannot be read: {error_line(error)}")]
        return [_call(each) for each in (found if isinstance(found, list) else [found])]


def mark_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of nanochat's markers; empty if the tokenizer does not have them."""
    known = tokenizer.get_vocab()
    return tuple(int(known[mark]) for mark in MARKS) if all(mark in known for mark in MARKS) else ()


def _of_expression(body: str, schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parses a call in nanochat's format: the text is the first argument of the only tool."""
    (schema,) = schemas
    argument = next(iter(schema["function"]["parameters"]["properties"]))
    return {"name": schema["function"]["name"], "arguments": {argument: body}}


def _call(found: Any) -> ToolCall:
    """Checks a parser's result, and converts it to a ToolCall."""
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall("", {}, "the tool call has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        # some parsers read Python literals, and a log cannot store sets or bytes
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are not a JSON object")
    return ToolCall(name, arguments)


def _whole_json(text: str) -> ToolCall | None:
    """Returns a call if the whole text is one JSON object with a name, as in Llama 3's templates;
    otherwise None.
    """
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not {"arguments", "parameters"} & found.keys():
        return None
    return _call(found) if isinstance(found.get("name"), str) else None
