"""Tokenizes what follows a model's turn in a chat: observations, and the header of the next turn.

Earlier turns are not tokenized again. The template renders a short conversation that contains the
observations. The part after the conversation's last assistant turn is tokenized and appended to the
existing tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from runners.data.messages import Message
from runners.data.rendering import apply_template, has_template, render
from runners.errors import UserError, error_line
from runners.tokenization.text import TextDecoder, encode

LONGEST = 32  # characters per token; on average, tokens are hardly ever longer
_ASKED = {"role": "user", "content": "a question"}
_SAID = "the answer"
_PROBE = "observed"  # detects templates that leave out observations


@attrs.frozen(eq=False)
class ChatTurns:
    """Converts observations to tokens, for one tokenizer and its tools."""

    tokenizer: Any
    schemas: Sequence[dict[str, Any]]
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    end_ids: frozenset[int] = frozenset()  # tokens that end a turn
    decoder: TextDecoder = attrs.field(
        default=attrs.Factory(lambda self: TextDecoder(self.tokenizer), takes_self=True)
    )
    mark_ids: tuple[int, ...] = ()  # ids of nanochat's markers

    def check(self, tool: str) -> None:
        """Raises UserError if the template cannot show the tools, or cannot continue after a call
        to `tool`.
        """
        try:
            render(
                self.tokenizer,
                (_ASKED,),
                tools=self.schemas,
                template_kwargs=self.template_kwargs,
            )
            self.follow((), [{"role": "tool", "name": tool, "content": "1"}])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the tokenizer's chat template fails with tools: {error_line(error)}"
            ) from error

    def cut(self, content: str, most: int) -> tuple[str, bool]:
        """Truncates an observation to `most` tokens. Returns the text, and whether it was
        truncated.
        """
        head = content[: most * LONGEST]  # encoding 10 MB would be slow
        tokens = encode(self.tokenizer, head, add_special_tokens=False) if head else ()
        if len(tokens) <= most and len(head) == len(content):
            return content, False
        return self.decoder.part(tokens[:most]) + " [cut]", True

    def follow(
        self, tokens: Sequence[int], observations: Sequence[dict[str, Any]]
    ) -> tuple[int, ...]:
        """Returns the tokens after a turn: its end, the observations, and the next header."""
        if self.mark_ids:  # in nanochat's format, the same turn continues after the output
            said = "".join(each["content"] for each in observations)
            *_, start, end = self.mark_ids
            return (start, *encode(self.tokenizer, said, add_special_tokens=False), end)
        if not has_template(self.tokenizer):
            following = "".join(f"\n\nTool: {each['content']}" for each in observations)
            return encode(self.tokenizer, f"{following}\n\nAssistant: ", add_special_tokens=False)
        before, after = self._rendered(self._forms(observations))
        return self._behind(tokens, before, after)

    def _behind(self, tokens: Sequence[int], before: str, after: str) -> tuple[int, ...]:
        """Tokenizes the text after a turn. End tokens that the turn already contains are not
        repeated.
        """
        ends = self._ends()
        place = max((before.rfind(text) for text in ends), default=-1)  # of the last end token
        close = before[place:] if place >= 0 else ""
        # the turn already ends with one of the model's end tokens
        if tokens and tokens[-1] in self.end_ids:
            close = close[max((len(text) for text in ends if close.startswith(text)), default=0) :]
        return encode(self.tokenizer, close + after, add_special_tokens=False)

    def _ends(self) -> list[str]:
        """Returns the texts of the tokens that end a turn."""
        return [text for text in map(self.tokenizer.convert_ids_to_tokens, self.end_ids) if text]

    def _forms(
        self, observations: Sequence[dict[str, Any]]
    ) -> list[tuple[Message, Sequence[Message]]]:
        """Returns an assistant's turn and the messages after it, in each form that templates
        accept. The preferred form is first.
        """
        tools = [
            {**each, "tool_call_id": f"call{number:05d}"}
            for number, each in enumerate(observations)
        ]
        calls = [
            {
                "id": each["tool_call_id"],
                "type": "function",
                "function": {"name": each.get("name") or "tool", "arguments": {}},
            }
            for each in tools
        ]
        plain = {"role": "assistant", "content": "ok"}
        merged = "\n\n".join(each["content"] for each in observations)
        return [
            ({"role": "assistant", "content": "", "tool_calls": calls}, tools),
            (plain, tools),
            (plain, [{"role": "user", "content": merged}]),  # for templates without tools
        ]

    def _rendered(self, forms: Sequence[tuple[Message, Sequence[Message]]]) -> tuple[str, str]:
        """Renders a conversation in the first form that the template supports. Returns the text up
        to the end of the assistant's turn, and the rest. Raises UserError if no form works.
        """
        fault = ""
        for assistant, following in forms:
            try:
                before = self._apply([_ASKED, assistant], head=False)
                whole = self._apply([_ASKED, assistant, *following], head=True)
                probed = [{**each, "content": _PROBE} for each in following]
                shows = _PROBE in self._apply([_ASKED, assistant, *probed], head=True)
                if not whole.startswith(before):
                    before, whole = self._by_words(assistant, following)
            except Exception as error:  # a template may raise anything
                fault = f": {error_line(error)}"
                continue
            if shows and whole.startswith(before):
                return before, whole[len(before) :]
        raise UserError(
            "the tokenizer's chat template cannot render a tool's message after an assistant's turn"
            + fault
        )

    def _by_words(self, assistant: Message, following: Sequence[Message]) -> tuple[str, str]:
        """Renders a conversation. Returns the text up to the end of the assistant's turn, and the
        whole text.

        Some templates render the last turn differently (Qwen3 adds empty thoughts), so the end is
        found by searching for the turn's text.
        """
        said = {**assistant, "content": _SAID}
        whole = self._apply([_ASKED, said, *following], head=True)
        before, words, behind = whole.rpartition(_SAID)
        ends = [behind.find(end) + len(end) for end in self._ends() if end in behind]
        if not (words and ends):
            raise ValueError("an assistant's turn has no end token")
        return before + words + behind[: min(ends)], whole

    def _apply(self, messages: Sequence[Mapping[str, Any]], *, head: bool) -> str:
        return apply_template(
            self.tokenizer,
            messages,
            tools=self.schemas,
            template_kwargs=self.template_kwargs,
            add_generation_prompt=head,
        )
