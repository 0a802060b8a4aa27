"""What a chat template does not do: plain text with speakers' names, merged system messages, tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEMPLATE_FILE = "chat_template.jinja"  # of a model folder; transformers prefers it to other places
SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant"}


def plain_text(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
    """``System: …``, ``User: …``, ``Assistant: …``, blank lines between; ready for the assistant's answer
    with `add_generation_prompt`."""
    turns = [f"{SPEAKERS[message['role']]}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, f"{SPEAKERS['assistant']}: "] if add_generation_prompt else turns)


def merge_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a leading system message put in front of the user's first words.

    Raises ValueError if a system message is elsewhere or no user message follows it.
    """
    if not any(message["role"] == "system" for message in messages):
        return list(messages)
    system, *rest = messages
    if system["role"] != "system" or any(message["role"] == "system" for message in rest):
        raise ValueError("expected a system message at the start of the conversation only, found one later")
    if not rest or rest[0]["role"] != "user":
        raise ValueError("no user message follows the system message")
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


def described_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The description of tools, and of the form of a call, for models whose chat template has no tools."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in schemas]
    form = '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>'
    return "\n".join(["You can call these tools:", *lines, f"To call one, write {form} and end your turn."])
