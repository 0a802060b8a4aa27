"""A conversation in which the model calls tools: its turns, their calls and answers, over one cache.

Nothing is tokenised again: each turn continues after the exact tokens of the turns before it, as in training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from runners.data.prompts import Example, Message, render
from runners.environments.environments import Begun, Environments
from runners.environments.episodes import Episode, Session
from runners.errors import UserError
from runners.inference.conversation import Conversation, Event
from runners.inference.episode_batches import play_episodes
from runners.inference.inference_model import InferenceModel
from runners.inference.text_generation import STOP, Completion, Sampling, Speed, stream
from runners.rewards.finished_episodes import COUNTS, FinishedEpisodes
from runners.rewards.scoring import Scorer
from runners.tokenization.text import TextDecoder

_LOOK = 0.02  # seconds between checks of a running call


class ToolConversation(Conversation):
    """A conversation with a user and with tools. The bounds of `[env]` apply to each message of the user.

    An environment is reset with the conversation's first message; a text that `reset` returns is appended to
    that message.
    """

    def __init__(
        self,
        model: InferenceModel,
        sampling: Sampling,
        environments: Environments,
        *,
        columns: Mapping[str, Any],
        system: str = "",
        nudge: str = "",
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any],
    ) -> None:
        """As `Conversation`; `columns`: the arguments of `reset`. The environments have the same nudge."""
        self.environments, self.columns = environments, dict(columns)
        self._begun: Begun | None = None
        super().__init__(
            model, sampling, system=system, nudge=nudge, stop=stop, template_kwargs=template_kwargs
        )

    def clear(self) -> None:
        """Forget every turn; an environment is reset at the next message."""
        if self._begun is not None:
            self.environments.release(self._begun)
        self._begun = None
        self._tokens: list[int] = []
        super().clear()

    def reply(
        self, text: str, *, stopped: Callable[[], bool] = lambda: False, speed: Speed | None = None
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
        room, drawn = self.sampling.max_tokens, 0
        while True:
            answer = None
            cached, self._known = self._rewind(prompt), []
            for piece in stream(
                self.model,
                prompt,
                attrs.evolve(self.sampling, max_tokens=room),
                decoder=self.decoder,
                find_stop=self.find_stop,
                cache=self._cache,
                cached=cached,
                number=self.turns,
                drawn=drawn,
                stops=begun.stops,
                stopped=stopped,
                speed=speed,
            ):
                if isinstance(piece, str):
                    yield piece
                else:
                    answer = piece
            assert isinstance(answer, Completion)
            self._tokens = self._known = [*prompt, *answer.tokens]
            room, drawn = room - len(answer.tokens), drawn + len(answer.tokens)
            if answer.finish != STOP or room <= 0:
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
            given = self._collected(begun, stopped)
            if given is None:
                yield Event("stop", episode.fault or "the calls are left behind")
                break
            told = [message["content"] for message in episode.messages[before:]]
            if begun.stops and given:  # nanochat's calculator has no messages
                told = [self.decoder.decode(given[1:-1])]  # between its marks
            yield from (Event("answer", line) for line in told)
            if len(given) >= room:
                yield Event("stop", f"no room for an answer in --max-tokens {self.sampling.max_tokens}")
                break
            prompt, room = [*self._tokens, *given], room - len(given)
        self.turns += 1
        yield from (Event("reward", line) for line in self._reward(episode))

    def _asked(self, text: str) -> list[int]:
        """The tokens up to the assistant's turn after a message of the user."""
        if self._tokens:
            chat = self.environments.chat
            return [*self._tokens, *chat.follow_user(self._tokens, text, self.nudge)]
        self.clear()  # after a first message that ended with an exception
        messages: list[Message] = [*self._system, {"role": "user", "content": text}]
        rendered, tokens = render(
            self.model.tokenizer,
            messages,
            self.nudge,
            tools=self.environments.schemas,
            template_kwargs=self.template_kwargs,
        )
        begun = self.environments.begin([Example(tuple(messages), rendered, tokens, "", self.columns)])
        (episode,) = begun.session.episodes
        if episode.fault:
            raise UserError(f"the environment: {episode.fault}")
        self._begun = begun
        return list(begun.prompts[0])

    def _collected(self, begun: Begun, stopped: Callable[[], bool]) -> Sequence[int] | None:
        """The reply to the running calls; None: it ends the conversation, or the user has stopped it."""
        while True:
            found = begun.session.collect(0)
            if 0 in found:
                return found[0]
            if stopped():
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


def play_prompts(
    model: InferenceModel,
    environments: Environments,
    conversations: Sequence[Sequence[Message]],
    sampling: Sampling,
    *,
    columns: Mapping[str, Any],
    nudge: str,
    stop: Sequence[str],
    template_kwargs: Mapping[str, Any],
    num_generations: int,
    max_batch: int,
    stopped: Callable[[], bool],
    speed: Speed,
) -> Iterator[tuple[Sequence[Message], dict[str, Any]]]:
    """Conversations that begin with these messages, in batches; yields their first messages and JSON rows.

    The first one of each prompt equals that of `ToolConversation` (to the rounding of batched products).
    `columns` are the arguments of each `reset`.
    """
    decoder = TextDecoder(model.tokenizer)
    examples = []
    for messages in conversations:
        text, tokens = render(
            model.tokenizer, messages, nudge, tools=environments.schemas, template_kwargs=template_kwargs
        )
        examples.append(Example(tuple(messages), text, tokens, "", dict(columns)))
    for episodes in play_episodes(
        environments,
        model.policy,
        {},
        examples,
        sampling.core(model.eos_ids, decoder.find_stop(stop), num_generations),
        key=sampling.key,
        rows=max_batch,
        stopped=stopped,
    ):
        played = episodes.played
        speed.prompt_tokens += sum(map(len, episodes.rollout.prompts))
        speed.tokens += sum(map(len, played.sampled))
        speed.seconds += episodes.seconds
        rewards = environment_rewards(environments, played)
        for row, text in enumerate(episodes.texts):
            yield (
                episodes.examples[row // num_generations].messages,
                {
                    "completion": text,
                    "finish": episodes.finish[row],
                    "tokens": len(played.sampled[row]),
                    "messages": list(played.messages[row]),
                    **{name: int(played.counts[name][row]) for name in ("turns", "calls", "failures")},
                    **({} if rewards is None else {"reward": rewards[row]}),
                    **({"fault": played.faults[row]} if played.faults[row] else {}),
                },
            )


def environment_rewards(environments: Environments, played: FinishedEpisodes) -> list[float | None] | None:
    """The environments' own rewards; None for one without, and None if the class has no `get_reward`."""
    if environments.reward is None:
        return None
    count = len(played.environments)
    scores = Scorer([environments.reward], environments.config.timeout).score(
        [""] * count, [[]] * count, {}, environments=played.environments
    )
    rows = zip(scores.values_kb[0].tolist(), played.faults, strict=True)
    return [None if fault or value != value else value for value, fault in rows]


def _calls(messages: Sequence[Message]) -> list[str]:
    """The calls of messages: the name, and the arguments in JSON."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [
        f"{call['name'] or '(unreadable)'}("
        + ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
        + ")"
        for call in calls
    ]
