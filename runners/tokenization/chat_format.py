"""Conversations as text for tokenizers without a template: nanochat's turns, or plain speakers' names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant"}
_TURNS = {
    "user": ("<|user_start|>", "<|user_end|>"),
    "assistant": ("<|assistant_start|>", "<|assistant_end|>"),
}
_BOS = "<|bos|>"


@attrs.frozen
class Piece:
    """A part of a rendered conversation."""

    text: str
    special: bool = False  # a special token's name; else ordinary text, whatever it contains


@attrs.frozen
class ChatFormat:
    """The form of a tokenizer's conversations.

    If its special tokens include nanochat's four turn marks, a conversation is ``<|bos|>``, then for each
    message ``<|user_start|>…<|user_end|>`` or ``<|assistant_start|>…<|assistant_end|>``; a system message
    is put in front of the first user message, because nanochat has none. Otherwise it is the plain form of
    `plain_text`.
    """

    marked: bool  # with turn marks
    bos: bool  # <|bos|> exists

    @classmethod
    def of(cls, special_tokens: Iterable[str]) -> ChatFormat:
        """The format for a vocabulary with these special tokens."""
        names = set(special_tokens)
        return cls(marked={mark for turn in _TURNS.values() for mark in turn} <= names, bos=_BOS in names)

    def pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> list[Piece]:
        """The conversation; `continue_final_message` leaves its last turn open.

        Raises ValueError for an unknown role, a content that is no text, and both options at once.
        """
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other")
        for message in messages:
            if message.get("role") not in SPEAKERS or not isinstance(message.get("content"), str):
                raise ValueError(
                    f"expected a message with a role of {', '.join(SPEAKERS)} and a text as its content, "
                    f"found {dict(message)!r:.200}"
                )
        start = [Piece(_BOS, special=True)] if self.bos else []
        if not self.marked:
            text = plain_text(messages, add_generation_prompt)
            return [*start, Piece(text if add_generation_prompt or continue_final_message else f"{text}\n\n")]
        pieces = list(start)
        for message in merge_system(messages):
            before, after = _TURNS[message["role"]]
            pieces += [Piece(before, special=True), Piece(message["content"]), Piece(after, special=True)]
        if continue_final_message:
            pieces.pop()
        if add_generation_prompt:
            pieces.append(Piece(_TURNS["assistant"][0], special=True))
        return pieces


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
