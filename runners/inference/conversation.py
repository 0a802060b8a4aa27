"""A conversation of several turns with a user.

Each turn renders the whole conversation again with its chat template; the engine keeps keys and values from
turn to turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.checks import TooLong
from runners.data.messages import Message
from runners.data.rendering import NO_KWARGS
from runners.engines.engine import ShouldStop, never, requests_of
from runners.errors import UserError
from runners.images.image_files import ImageFile
from runners.inference.inference_model import InferenceModel
from runners.inference.text_generation import Completion, Speed, stream


@attrs.define(eq=False)
class Conversation:
    """The messages so far."""

    model: InferenceModel
    sampling: g.Sampling
    key: mx.array = attrs.field(kw_only=True)
    system: str = attrs.field(default="", kw_only=True)  # the system message; empty: none
    nudge: str = attrs.field(default="", kw_only=True)  # first words of each reply
    template_kwargs: Mapping[str, Any] = attrs.field(default=NO_KWARGS, kw_only=True)  # for the chat template
    raw: bool = attrs.field(default=False, kw_only=True)  # texts are continued, as with data.prompt_form
    messages: list[Message] = attrs.field(init=False)
    turns: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self.turns = 0
        self.messages = [{"role": "system", "content": self.system}] if self.system.strip() else []

    def reply(
        self,
        text: str,
        *,
        images: Sequence[ImageFile] = (),
        should_stop: ShouldStop = never,
        speed: Speed | None = None,
    ) -> Iterator[str]:
        """The assistant's answer to a message, piece by piece.

        If `should_stop` ends the answer, the part so far stays in the conversation. If an exception ends it,
        the conversation does not change.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        how = {"images": images, "most": self.sampling.max_new_tokens, "raw": self.raw}
        prompt = self.model.example(messages, self.nudge, self.template_kwargs, **how)
        if self.nudge:
            yield self.nudge
        request = requests_of([prompt], [self.turns], self.model.vision)
        how = {"key": self.key, "decoder": self.model.decoder, "should_stop": should_stop, "speed": speed}
        answer = ""
        try:
            for piece in stream(self.model.engine, request, self.sampling, **how):
                if isinstance(piece, Completion):
                    answer = piece.text
                else:
                    yield piece
        except TooLong as error:
            raise UserError(f"{self.model.path}: {error}") from error
        self.messages = [*messages, {"role": "assistant", "content": self.nudge + answer}]
        self.turns += 1
