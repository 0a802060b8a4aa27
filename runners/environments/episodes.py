"""A rollout's episodes: an environment for each row, its turns and calls, and their data for rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import grpo_fn as g
from runners.data.prompts import Example, Message, render
from runners.environments.call_pool import CallPool, CallResult
from runners.environments.chat_turns import ChatTurns
from runners.environments.tool_calls import CallReader, ToolCall
from runners.environments.tools import tool_methods
from runners.errors import did_you_mean
from runners.rewards.finished_episodes import COUNTS, FinishedEpisodes

_LONGEST_ERROR = 400  # characters of an error that a model is shown


@attrs.define(eq=False)
class Episode:
    """One row's conversation."""

    example: Example
    environment: Any = None  # None: no environment, or its reset failed
    functions: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)
    messages: list[Message] = attrs.field(factory=list)  # messages after the prompt
    counts: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(COUNTS, 0))
    fault: str = ""  # why it has no reward; empty: it has one
    seconds: float = 0.0  # of its calls
    hung: bool = False  # a call exceeded its time limit and may still change the environment


@attrs.frozen
class Limits:
    """The bounds of [env]."""

    max_turns: int = 8
    max_tool_calls: int = 0
    max_observation_tokens: int = 512
    no_reward_on_error: bool = False


class Session:
    """`grpo_fn.rollout.Replies` for one rollout: reads calls, runs them in the pool, writes observations."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        reader: CallReader,
        chat: ChatTurns,
        pool: CallPool,
        limits: Limits,
        nudge: str = "",
    ) -> None:
        """`episodes`: started ones of all rows; `nudge` precedes each row's first words."""
        self.episodes = list(episodes)
        self._reader, self._chat, self.pool, self._limits, self._nudge = reader, chat, pool, limits, nudge
        self._turns: dict[int, Sequence[int]] = {}  # each row's turn that waits for a reply

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        """As `Replies`: a turn without a call, or one too many, ends the conversation."""
        episode, limits = self.episodes[row], self._limits
        calls = self._hear(episode, tokens)
        if not calls or episode.fault or episode.counts["turns"] >= limits.max_turns:
            return False
        used = episode.counts["calls"]
        room = limits.max_tool_calls - used if limits.max_tool_calls else len(calls)
        episode.counts["calls"] += len(calls)
        acts = [self._act(episode, call) for call in calls[: max(room, 0)]]
        refused = len(calls) - len(acts)
        self._turns[row] = tokens
        names = [call.name for call in calls]
        most = limits.max_observation_tokens
        run = _Run(acts, names, refused, limits.max_tool_calls, most * 32)
        if acts and all(act.is_async for act in acts):
            self.pool.submit_async(row, run.awaited)
        else:
            self.pool.submit(row, run)
        return True

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        """As `Replies`."""
        return {row: self._reply(row, outcome) for row, outcome in self.pool.collect(least).items()}

    def leave(self, row: int, pool: CallPool) -> None:
        """Stop waiting for a row's calls (they may still change its environment); others run in `pool`."""
        self._turns.pop(row, None)
        self.episodes[row].hung, self.pool = True, pool

    def finish(self, rollout: g.Rollout) -> FinishedEpisodes:
        """The data for rewards and the log, after the rollout."""
        sampled_rows = []
        for row, (tokens, sampled) in enumerate(zip(rollout.completions(), rollout.sampled(), strict=True)):
            sampled_rows.append(tuple(token for token, mine in zip(tokens, sampled, strict=True) if mine))
            episode, begins = self.episodes[row], _turn_starts(sampled)
            if len(begins) > episode.counts["turns"]:  # a turn that reached the length limit
                self._hear(episode, tokens[begins[-1] :])
            while episode.messages and episode.messages[-1]["role"] == "tool":
                episode.messages.pop()  # there was no room for an answer to it
        return FinishedEpisodes(
            tuple(tuple(episode.messages) for episode in self.episodes),
            tuple(episode.environment for episode in self.episodes),
            {name: np.array([e.counts[name] for e in self.episodes], np.int64) for name in COUNTS},
            tuple(episode.fault for episode in self.episodes),
            tuple(sampled_rows),
            tuple(episode.seconds for episode in self.episodes),
        )

    def _hear(self, episode: Episode, tokens: Sequence[int]) -> tuple[ToolCall, ...]:
        written = self._reader.read(self._chat.text(tokens))
        message = written.message()
        if not episode.messages:
            message["content"] = self._nudge + message["content"]
        episode.messages.append(message)
        episode.counts["turns"] += 1
        return written.calls

    def _act(self, episode: Episode, call: ToolCall) -> _Act:
        if call.fault:
            return _Act(fault=call.fault)
        function = episode.functions.get(call.name)
        if function is None:
            near = did_you_mean(call.name, list(episode.functions))
            return _Act(fault=f"there is no tool {call.name}{near}")
        return _Act(function, call.arguments, inspect.iscoroutinefunction(function))

    def _reply(self, row: int, outcome: CallResult) -> Sequence[int] | None:
        episode, tokens = self.episodes[row], self._turns.pop(row)
        episode.seconds += outcome.seconds
        results = [_Result("tool", outcome.fault, True)] if outcome.fault else outcome.value
        if outcome.timed_out:
            episode.counts["timeouts"] += 1
            episode.hung = True
        observations = []
        for result in results:
            episode.counts["failures"] += result.failed
            text, cut = self._chat.cut(result.text, self._limits.max_observation_tokens)
            episode.counts["cut"] += cut or result.cut
            observations.append({"role": "tool", "name": result.name, "content": text})
        failed = next((result for result in results if result.failed), None)
        if failed is not None and self._limits.no_reward_on_error:
            episode.fault = f"{failed.name}: {failed.text}"
            return None
        episode.messages += observations
        return self._chat.follow(tokens, observations)


@attrs.frozen(eq=False)
class _Act:
    function: Callable[..., Any] | None = None
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    is_async: bool = False
    fault: str = ""


@attrs.frozen
class _Result:
    name: str
    text: str
    failed: bool = False
    cut: bool = False


@attrs.frozen(eq=False)
class _Run:
    """A turn's calls, which the pool runs one after another. Results become texts there as well."""

    acts: Sequence[_Act]
    names: Sequence[str]
    refused: int
    allowed: int
    characters: int

    def __call__(self) -> Any:
        if any(act.is_async for act in self.acts):
            return self.awaited()
        return [
            self._done(act, name) for act, name in zip(self.acts, self.names, strict=False)
        ] + self._rest()

    async def awaited(self) -> list[_Result]:
        """The same, with coroutines awaited."""
        found = []
        for act, name in zip(self.acts, self.names, strict=False):
            if not act.is_async or act.function is None:
                found.append(self._done(act, name))
                continue
            try:
                found.append(self._shown(name, await act.function(**act.arguments)))
            except Exception as error:
                found.append(_error(name, _error_text(error)))
        return found + self._rest()

    def _done(self, act: _Act, name: str) -> _Result:
        if act.function is None:
            return _error(name or "tool", act.fault)
        try:
            return self._shown(name, act.function(**act.arguments))
        except (Exception, SystemExit) as error:
            return _error(name, _error_text(error))

    def _shown(self, name: str, value: Any) -> _Result:
        if isinstance(value, list) and all(isinstance(x, Mapping) and x.get("type") == "text" for x in value):
            value = "".join(str(block.get("text", "")) for block in value)
        text = str(value)
        # Half of a surrogate pair, which no tokenizer can read, becomes a question mark.
        text = text[: self.characters + 1].encode("utf-8", "replace").decode()
        return _Result(name, text, cut=len(text) > self.characters)

    def _rest(self) -> list[_Result]:
        fault = f"not called: a conversation has {self.allowed} tool calls, and they are used up"
        return [_error(name, fault) for name in self.names[len(self.acts) : len(self.acts) + self.refused]]


def _turn_starts(sampled: Sequence[bool]) -> list[int]:
    """The start of each run of sampled tokens."""
    return [n for n, mine in enumerate(sampled) if mine and (n == 0 or not sampled[n - 1])]


def _error(name: str, fault: str) -> _Result:
    return _Result(name, str({"error": fault}), failed=True)


def _error_text(error: BaseException) -> str:
    try:
        return (str(error) or type(error).__name__)[:_LONGEST_ERROR]
    except Exception:  # raised by the tool's own exception class
        return type(error).__name__


def begun_prompt(
    example: Example,
    observation: Any,
    tokenizer: Any,
    nudge: str,
    schemas: Sequence[dict[str, Any]],
    template_kwargs: Mapping[str, Any],
) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """The prompt after `reset`: if it returned a text, that is appended to the last message."""
    if isinstance(observation, list):
        observation = "".join(str(x.get("text", "")) for x in observation if isinstance(x, Mapping))
    if observation is None or observation == "":
        return example.messages, example.tokens
    *before, last = example.messages
    messages = (*before, {**last, "content": f"{last['content']}{observation}"})
    return messages, render(tokenizer, messages, nudge, tools=schemas, template_kwargs=template_kwargs)[1]


def begun_episode(example: Example, environment: Any, functions: Mapping[str, Callable[..., Any]]) -> Episode:
    """An episode before its first turn, with the environment's methods and the plain functions as tools."""
    methods = {} if environment is None else tool_methods(environment)
    return Episode(example, environment, {**functions, **methods})
