"""A conversation of several turns, with a user and, if there are any, with tools.

Without tools each turn renders the whole conversation again with its chat template; the engine keeps keys and
values from turn to turn. With tools nothing is tokenised again: each turn continues after the exact tokens of
the turns before it, as in training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.checks import TooLong
from runners.data.messages import Message
from runners.data.prompts import Example
from runners.data.rendering import NO_KWARGS
from runners.engines.engine import Requests, ShouldStop, never
from runners.engines.settings import requests_of
from runners.environments.environments import Begun, Environments
from runners.environments.episodes import Episode, Session
from runners.errors import UserError
from runners.images.image_files import ImageFile
from runners.inference.inference_model import InferenceModel
from runners.inference.text_generation import STOP, Completion, Speed, stream
from runners.rewards.finished_episodes import COUNTS
from runners.rewards.scoring import Scorer

_LOOK = 0.02  # seconds between checks of a running call


@attrs.frozen
class Event:
    """An event between two turns of a model that calls tools."""

    kind: str  # "call", "answer", "stop" (no more turns) or "reward"
    text: str


@attrs.define(eq=False)
class Conversation:
    """The messages so far. With tools, the bounds of `[env]` apply to each message of the user.

    An environment is reset with the conversation's first message; a text that `reset` returns is appended to
    that message.
    """

    model: InferenceModel
    sampling: g.Sampling
    key: mx.array = attrs.field(kw_only=True)
    system: str = attrs.field(default="", kw_only=True)  # the system message; empty: none
    nudge: str = attrs.field(default="", kw_only=True)  # first words of each reply
    template_kwargs: Mapping[str, Any] = attrs.field(default=NO_KWARGS, kw_only=True)  # for the chat template
    raw: bool = attrs.field(default=False, kw_only=True)  # texts are continued, as with data.prompt_form
    environments: Environments | None = attrs.field(default=None, kw_only=True)  # with the same nudge
    columns: Mapping[str, Any] = attrs.field(default=NO_KWARGS, kw_only=True)  # the arguments of `reset`
    messages: list[Message] = attrs.field(init=False)
    turns: int = attrs.field(init=False)
    _begun: Begun | None = attrs.field(default=None, init=False)
    _tokens: list[int] = attrs.field(init=False)  # of a conversation with tools

    def __attrs_post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every turn; the system message stays, and an environment is reset at the next message."""
        if self._begun is not None and self.environments is not None:
            self.environments.release(self._begun)
        self._begun, self._tokens, self.turns = None, [], 0
        self.messages = [{"role": "system", "content": self.system}] if self.system.strip() else []

    def reply(
        self,
        text: str,
        *,
        images: Sequence[ImageFile] = (),
        should_stop: ShouldStop = never,
        speed: Speed | None = None,
    ) -> Iterator[str | Event]:
        """The assistant's answer to a message, piece by piece; with tools its turns up to one without a call,
        with calls and answers in between.

        If `should_stop` ends the answer, the part so far stays in the conversation. If an exception ends it,
        the conversation does not change. UserError, with the reason, if the environment cannot be reset.
        """
        if self.environments is not None:
            yield from self._turns(text, self.environments, should_stop, speed)
            return
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt = self._example(messages, images=images)
        if self.nudge:
            yield self.nudge
        request = requests_of([prompt], [self.turns], self.model.vision)
        answer = yield from self._stream(request, self.sampling, should_stop, speed)
        self.messages = [*messages, {"role": "assistant", "content": self.nudge + answer.text}]
        self.turns += 1

    def _turns(
        self, text: str, environments: Environments, should_stop: ShouldStop, speed: Speed | None
    ) -> Iterator[str | Event]:
        prompt = self._asked(text, environments)
        begun = self._begun
        assert begun is not None
        (episode,) = begun.session.episodes
        episode.counts, episode.fault = dict.fromkeys(COUNTS, 0), ""
        if self.nudge:
            yield self.nudge
        most, drawn = self.sampling.max_new_tokens, 0
        left, ends = most, self.sampling.eos_ids | begun.stops
        while True:
            request = Requests(prompts=[prompt], numbers=[self.turns], drawn=drawn)
            sampling = attrs.evolve(self.sampling, max_new_tokens=left, eos_ids=ends)
            answer = yield from self._stream(request, sampling, should_stop, speed)
            self._tokens = [*prompt, *answer.tokens]
            left, drawn = left - len(answer.tokens), drawn + len(answer.tokens)
            if answer.finish != STOP or left <= 0:
                break
            before = len(episode.messages)
            going = begun.session.begin(0, answer.tokens)
            calls = _calls(episode.messages[before:])
            if not going:
                if calls:
                    turns = environments.config.max_turns
                    yield Event("stop", f"the calls are not made: these are {turns} turns")
                break
            yield from (Event("call", line) for line in calls)
            before = len(episode.messages)
            given = _collected(begun, should_stop)
            if given is None:
                yield Event("stop", episode.fault or "the calls are left behind")
                break
            answers = [message["content"] for message in episode.messages[before:]]
            if begun.stops and given:  # nanochat's calculator has no messages
                answers = [self.model.decoder.decode(given[1:-1])]  # between its marks
            yield from (Event("answer", line) for line in answers)
            if len(given) >= left:
                yield Event("stop", f"no room for an answer in --max-tokens {most}")
                break
            prompt, left = [*self._tokens, *given], left - len(given)
        self.turns += 1
        yield from (Event("reward", line) for line in _reward(environments, episode))

    def _asked(self, text: str, environments: Environments) -> list[int]:
        """The tokens up to the assistant's turn after a message of the user."""
        if self._tokens:
            return [*self._tokens, *environments.chat.follow_user(self._tokens, text, self.nudge)]
        self.clear()  # after a first message that ended with an exception
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        begun = environments.begin([self._example(messages, environments.schemas)])
        (episode,) = begun.session.episodes
        if episode.fault:
            raise UserError(f"the environment: {episode.fault}")
        self._begun = begun
        return list(begun.prompts[0])

    def _example(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), images: Sequence[ImageFile] = ()
    ) -> Example:
        most, how = self.sampling.max_new_tokens, (self.nudge, self.template_kwargs, tools, self.columns)
        return self.model.example(messages, *how, images, most=most, raw=self.raw)

    def _stream(
        self, request: Requests, sampling: g.Sampling, should_stop: ShouldStop, speed: Speed | None
    ) -> Generator[str, None, Completion]:
        """The pieces of a completion; returns it."""
        how = {"key": self.key, "decoder": self.model.decoder, "should_stop": should_stop, "speed": speed}
        try:
            for piece in stream(self.model.engine, request, sampling, **how):
                if isinstance(piece, Completion):
                    return piece
                yield piece
        except TooLong as error:
            raise UserError(f"{self.model.path}: {error}") from error
        raise AssertionError("a stream ends with its completion")


def _collected(begun: Begun, should_stop: ShouldStop) -> Sequence[int] | None:
    """The reply to the running calls; None: it ends the conversation, or the user has stopped it."""
    while True:
        found = begun.session.collect(0)
        if 0 in found:
            return found[0]
        if should_stop():
            assert isinstance(begun.session, Session)
            begun.session.leave(0)
            return None
        time.sleep(_LOOK)


def _reward(environments: Environments, episode: Episode) -> list[str]:
    if environments.reward is None or episode.hung:
        return []
    scorer = Scorer([environments.reward], environments.config.timeout)
    scores = scorer.score([""], [[]], {}, environments=[episode.environment])
    return scores.problems or [f"{scores.values_kb[0, 0]:g}"]


def _calls(messages: Sequence[Message]) -> list[str]:
    """The calls of messages: the name, and the arguments in JSON."""
    lines = []
    for call in (each["function"] for message in messages for each in message.get("tool_calls", ())):
        given = [
            f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call["arguments"].items()
        ]
        lines.append(f"{call['name'] or '(unreadable)'}({', '.join(given)})")
    return lines
