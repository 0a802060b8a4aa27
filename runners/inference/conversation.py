"""A conversation of several turns that computes keys and values only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from grpo_fn.rollout import FindStop
from runners.data.prompts import NO_KWARGS, Message, render
from runners.inference.inference_model import InferenceModel
from runners.inference.text_generation import Completion, Sampling, Speed, stream
from runners.tokenization.text import TextDecoder


@attrs.frozen
class Event:
    """An event between two turns of a model that calls tools."""

    kind: str  # "call", "answer", "stop" (no more turns) or "reward"
    text: str


class Conversation:
    """The messages so far, and the cache for their prompt.

    Each turn renders the whole conversation again with its chat template, and reuses the part of the cache
    that matches the start of the new prompt.
    """

    def __init__(
        self,
        model: InferenceModel,
        sampling: Sampling,
        *,
        system: str = "",
        nudge: str = "",
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
    ):
        """`system`: the system message, if any. `nudge`: first words of each reply. `stop`: stop strings.
        `template_kwargs`: further arguments of the chat template."""
        self.model, self.sampling, self.nudge = model, sampling, nudge
        self.template_kwargs = template_kwargs
        self.decoder = TextDecoder(model.tokenizer)
        self.find_stop: FindStop | None = self.decoder.find_stop(stop)
        self._system: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
        self.clear()

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self.messages: list[Message] = list(self._system)
        self.turns = 0
        self._cache: list[Any] | None = None
        self._known: list[int] = []  # tokens whose keys and values are in the cache

    def reply(
        self, text: str, *, stopped: Callable[[], bool] = lambda: False, speed: Speed | None = None
    ) -> Iterator[str | Event]:
        """The assistant's answer to a message, piece by piece; both are added to the messages at its end.

        If `stopped` ends the answer, the part so far stays in the conversation. If an exception ends it, the
        conversation does not change.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        _, prompt = render(self.model.tokenizer, messages, self.nudge, template_kwargs=self.template_kwargs)
        cached = self._rewind(prompt)
        known, self._known = [*prompt], []  # while the cache is written, its content is unknown
        if self.nudge:
            yield self.nudge
        for piece in stream(
            self.model,
            prompt,
            self.sampling,
            decoder=self.decoder,
            find_stop=self.find_stop,
            cache=self._cache,
            cached=cached,
            number=self.turns,
            stopped=stopped,
            speed=speed,
        ):
            if isinstance(piece, str):
                yield piece
                continue
            answer: Completion = piece
            self._known = [*known, *answer.tokens]
            self.messages = [*messages, {"role": "assistant", "content": self.nudge + answer.text}]
            self.turns += 1

    def _rewind(self, prompt: Sequence[int]) -> int:
        """Cut the cache to its common start with the prompt, less the last token; the number of tokens."""
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        shared = 0
        for one, other in zip(self._known, prompt[:-1], strict=False):
            if one != other:
                break
            shared += 1
        held = getattr(self._cache[0], "offset", None) if self._cache else None
        if shared and isinstance(held, int) and self._cache and can_trim_prompt_cache(self._cache):
            shared = min(shared, held)
            if trim_prompt_cache(self._cache, held - shared) == held - shared:
                return shared
        self._cache = make_prompt_cache(self.model.module)
        return 0
