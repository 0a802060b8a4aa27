"""Converts chats to tokens, and completions to replies, which consist of content, thoughts and tool
calls.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

import grpo_fn as g
from runners.answers.thoughts import split_thoughts
from runners.data.messages import Message, conversation
from runners.data.rendering import opening, render
from runners.environments.chat_turns import ChatTurns
from runners.environments.tool_calls import CallReader, mark_ids
from runners.errors import UserError
from runners.tokenization.text import TextDecoder, TextStream


@attrs.frozen(eq=False, kw_only=True)
class Chat:
    """A conversation that the model must reply to."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # tool schemas, for the template
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def keys(self) -> list[str]:
        """The conversation's keys: one for its tools and template arguments, and one per message.
        Equal messages have equal keys.
        """
        begun = [list(self.tools), dict(self.template_kwargs)]
        return [json.dumps(begun, sort_keys=True), *map(message_key, self.messages)]


def message_key(message: Message, *, thoughts: bool = True) -> str:
    """Returns a text that is equal for messages with equal content. If `thoughts` is True, their
    thoughts must also be equal.
    """
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]
    thought = message.get("reasoning_content") if thoughts else None
    return json.dumps([*said, thought and thought.strip()], sort_keys=True)


@attrs.frozen(eq=False, kw_only=True)
class Reply:
    """A completion, parsed as a message."""

    content: str = ""
    thoughts: str = ""
    calls: tuple[dict[str, Any], ...] = ()  # in the form that templates use: arguments are objects

    @property
    def message(self) -> Message:
        """The reply in the message form that chat templates use."""
        more = {"reasoning_content": self.thoughts, "tool_calls": [*self.calls]}
        given = {name: value for name, value in more.items() if value}
        return {"role": "assistant", "content": self.content, **given}


@attrs.frozen(eq=False, kw_only=True)
class ServedModel:
    """The model properties that the API needs."""

    name: str
    tokenizer: Any
    decoder: TextDecoder
    eos_ids: frozenset[int]
    vocabulary: int | None  # token ids must be smaller; None means unknown
    length: int  # maximum number of tokens in a prompt plus its completion
    sampling: g.Sampling  # default sampling settings for calls
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    system: str = ""  # default system message, for chats that have none
    nudge: str = ""  # text that starts the first reply

    def prompt(self, chat: Chat) -> tuple[int, ...]:
        """Tokenizes a chat, up to the start of the reply.

        Raises UserError if the template fails.
        """
        messages = conversation(chat.messages, self.system)
        kwargs = self._kwargs(chat)
        _, tokens = render(
            self.tokenizer,
            messages,
            self.nudge,
            tools=() if self.marks(chat) else chat.tools,
            template_kwargs=kwargs,
        )
        return tokens

    def marks(self, chat: Chat) -> tuple[int, ...]:
        """Returns the ids of nanochat's markers, which enclose tool calls. The result is empty
        unless the tokenizer has these markers and the chat has exactly one tool.
        """
        return mark_ids(self.tokenizer) if len(chat.tools) == 1 else ()

    def following(
        self, ids: Sequence[int], chat: Chat, messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """Tokenizes the messages that follow a reply, up to the start of the next reply. `ids` are
        the tokens until the end of that reply.

        Returns None if the template cannot render the messages there, if there are no messages, or
        if they contain an assistant message.
        """
        if not messages or any(message["role"] == "assistant" for message in messages):
            return None
        tokenizer = self.tokenizer
        marks = self.marks(chat) if all(each["role"] == "tool" for each in messages) else ()
        shown = () if self.marks(chat) else chat.tools
        kwargs = self._kwargs(chat)
        turns = ChatTurns(tokenizer, shown, kwargs, self.eos_ids, self.decoder, marks)
        try:
            return turns.follow(ids, messages)
        except UserError:
            return None

    def check(self, prompt: Sequence[int]) -> None:
        """Raises UserError if the prompt contains ids that the model does not have."""
        most = self.vocabulary
        if most is not None and max(prompt, default=0) >= most:
            raise UserError(f"prompt: expected token ids below {most}, found {max(prompt)}")

    def reader(self, chat: Chat | None, stops: Sequence[str], *, first: bool) -> ReplyReader:
        """Returns the parser for a chat's replies; `first` is True for the chat's first reply. If
        `chat` is None, completions are plain text.
        """
        tokenizer = self.tokenizer
        if chat is None:
            return ReplyReader(stops=tuple(stops))
        thinks = getattr(tokenizer, "has_thinking", False)
        return ReplyReader(
            stops=tuple(stops),
            calls=CallReader.of(tokenizer, chat.tools, marked=bool(self.marks(chat)))
            if chat.tools
            else None,
            tags=(tokenizer.think_start, tokenizer.think_end) if thinks else (),
            opening=opening(tokenizer, self._kwargs(chat)) + (self.nudge if first else ""),
        )

    def _kwargs(self, chat: Chat) -> dict[str, Any]:
        return {**self.template_kwargs, **chat.template_kwargs}


@attrs.frozen(eq=False, kw_only=True)
class ReplyReader:
    """Parses completions as replies, during and after generation."""

    stops: tuple[str, ...] = ()  # a reply ends before the first stop string
    calls: CallReader | None = None  # None means there are no tools
    tags: tuple[str, ...] = ()  # the tags around thoughts; empty if the model writes none
    opening: str = ""  # the reply's first words, which the prompt already contains

    def read(self, text: str, *, whole: bool) -> Reply:
        """Parses a completion's text as a reply. If `whole` is False, the completion is unfinished,
        and only the part that can no longer change is returned.
        """
        places = [text.find(stop) for stop in self.stops if stop in text]
        text = self.opening + (text[: min(places)] if places else text)
        if not whole:
            text = text[: len(text) - self._held(text)]
        thoughts, said = split_thoughts(text, self.tags)
        for tag in self.tags:
            thoughts = thoughts.strip().removeprefix(tag).removesuffix(tag)
        thoughts = thoughts.strip()
        content = said or ""
        if self.tags:
            content = content.lstrip()
        if self.calls is None:
            return Reply(content=content, thoughts=thoughts)
        if not whole:
            return Reply(content=self._before_calls(content), thoughts=thoughts)
        around, calls = self.calls.read(content)
        if any(call.fault for call in calls):  # an unreadable call is returned as text
            return Reply(content=content, thoughts=thoughts)
        made = [{"id": f"call_{secrets.token_hex(12)}", **call.message()} for call in calls]
        return Reply(content=around if made else content, thoughts=thoughts, calls=tuple(made))

    def _held(self, text: str) -> int:
        """Returns the number of trailing characters that may be the start of a stop string, a tag
        or a call.
        """
        marks = [*self.stops, *self.tags, *([self.calls.start] if self.calls else ())]
        longest = max(map(len, marks), default=1)
        ends = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(mark.startswith(text[-n:]) for mark in marks)), 0)

    def _before_calls(self, content: str) -> str:
        """Returns the text before a tool call; empty if the whole content may be a call."""
        reader = self.calls
        if reader is None or (reader.parser is None and content.lstrip().startswith("{")):
            return ""
        return content.partition(reader.start)[0]


class ReplyStream:
    """Splits a reply into pieces while its tokens are being generated."""

    def __init__(self, reader: ReplyReader, decoder: TextDecoder) -> None:
        """Starts without tokens."""
        self._reader = reader
        self._stream = TextStream(decoder)
        self._text = ""
        self._sent = Reply()

    def add(self, tokens: Sequence[int]) -> Reply:
        """Adds tokens, and returns the new part of the reply."""
        self._text += "".join(map(self._stream.add, tokens))
        return self.rest(self._reader.read(self._text, whole=False))

    def rest(self, reply: Reply) -> Reply:
        """Returns the part of the finished reply that has not been sent."""
        before = self._sent
        self._sent = reply
        return attrs.evolve(
            reply,
            thoughts=reply.thoughts[len(before.thoughts) :],
            content=reply.content[len(before.content) :],
        )
