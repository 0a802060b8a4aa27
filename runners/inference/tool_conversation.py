"""A conversation in which the model calls tools: its turns, their calls and answers.

Nothing is tokenised again: each turn continues after the exact tokens of the turns before it, as in training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from runners.data.messages import Message
from runners.engines.engine import Requests, ShouldStop, never
from runners.environments.environments import Begun, Environments
from runners.environments.episodes import Episode, Session
from runners.errors import UserError
from runners.images.image_files import ImageFile
from runners.inference.batches import STOP
from runners.inference.conversation import Conversation, Event
from runners.inference.text_generation import Completion, Speed
from runners.rewards.finished_episodes import COUNTS
from runners.rewards.scoring import Scorer

_LOOK = 0.02  # seconds between checks of a running call


@attrs.define(eq=False)
class ToolConversation(Conversation):
    """A conversation with a user and with tools. The bounds of `[env]` apply to each message of the user.

    An environment is reset with the conversation's first message; a text that `reset` returns is appended to
    that message.
    """

    environments: Environments  # with the same nudge
    columns: Mapping[str, Any] = attrs.field(kw_only=True)  # the arguments of `reset`
    _begun: Begun | None = attrs.field(default=None, init=False)
    _tokens: list[int] = attrs.field(init=False)

    def clear(self) -> None:
        """Forget every turn; an environment is reset at the next message."""
        if self._begun is not None:
            self.environments.release(self._begun)
        self._begun = None
        self._tokens = []
        super().clear()

    def reply(
        self,
        text: str,
        *,
        images: Sequence[ImageFile] = (),
        should_stop: ShouldStop = never,
        speed: Speed | None = None,
    ) -> Iterator[str | Event]:
        """The assistant's turns up to one without a call, piece by piece, with calls and answers in between.

        If the environment cannot be reset, raises UserError with the reason; the conversation does not
        change.
        """
        prompt = self._asked(text)
        begun = self._begun
        assert begun is not None
        (episode,) = begun.session.episodes
        episode.counts, episode.fault = dict.fromkeys(COUNTS, 0), ""
        if self.nudge:
            yield self.nudge
        left, drawn = self.sampling.max_new_tokens, 0
        ends = self.sampling.eos_ids | begun.stops
        while True:
            answer = None
            request = Requests(prompts=[prompt], numbers=[self.turns], drawn=drawn)
            sampling = attrs.evolve(self.sampling, max_new_tokens=left, eos_ids=ends)
            for piece in self._stream(request, sampling, should_stop, speed):
                if isinstance(piece, str):
                    yield piece
                else:
                    answer = piece
            assert isinstance(answer, Completion)
            self._tokens = [*prompt, *answer.tokens]
            left, drawn = left - len(answer.tokens), drawn + len(answer.tokens)
            if answer.finish != STOP or left <= 0:
                break
            before = len(episode.messages)
            going = begun.session.begin(0, answer.tokens)
            calls = _calls(episode.messages[before:])
            if not going:
                if calls:
                    most = self.environments.config.max_turns
                    yield Event("stop", f"the calls are not made: these are {most} turns")
                break
            yield from (Event("call", line) for line in calls)
            before = len(episode.messages)
            given = self._collected(begun, should_stop)
            if given is None:
                yield Event("stop", episode.fault or "the calls are left behind")
                break
            answers = [message["content"] for message in episode.messages[before:]]
            if begun.stops and given:  # nanochat's calculator has no messages
                answers = [self.model.decoder.decode(given[1:-1])]  # between its marks
            yield from (Event("answer", line) for line in answers)
            if len(given) >= left:
                yield Event("stop", f"no room for an answer in --max-tokens {self.sampling.max_new_tokens}")
                break
            prompt, left = [*self._tokens, *given], left - len(given)
        self.turns += 1
        yield from (Event("reward", line) for line in self._reward(episode))

    def _asked(self, text: str) -> list[int]:
        """The tokens up to the assistant's turn after a message of the user."""
        if self._tokens:
            chat = self.environments.chat
            return [*self._tokens, *chat.follow_user(self._tokens, text, self.nudge)]
        self.clear()  # after a first message that ended with an exception
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        schemas = self.environments.schemas
        most = self.sampling.max_new_tokens
        how = self.nudge, self.template_kwargs, schemas, self.columns
        first = self.model.example(messages, *how, most=most)
        begun = self.environments.begin([first])
        (episode,) = begun.session.episodes
        if episode.fault:
            raise UserError(f"the environment: {episode.fault}")
        self._begun = begun
        return list(begun.prompts[0])

    def _collected(self, begun: Begun, should_stop: ShouldStop) -> Sequence[int] | None:
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

    def _reward(self, episode: Episode) -> list[str]:
        reward = self.environments.reward
        if reward is None or episode.hung:
            return []
        scores = Scorer([reward], self.environments.config.timeout).score(
            [""], [[]], {}, environments=[episode.environment]
        )
        return scores.problems or [f"{scores.values_kb[0, 0]:g}"]


def _calls(messages: Sequence[Message]) -> list[str]:
    """The calls of messages: the name, and the arguments in JSON."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [
        f"{call['name'] or '(unreadable)'}("
        + ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
        + ")"
        for call in calls
    ]
