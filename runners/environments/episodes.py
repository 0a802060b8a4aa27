"""Manages a rollout's episodes: each row's environment, turns, calls, and data for rewards."""

from collections.abc import Mapping, Sequence
from itertools import compress

import attrs

import grpo_fn as g
from runners.answers.thoughts import split_thoughts
from runners.config.sections import EnvConfig
from runners.data.messages import Message
from runners.data.prompts import Example
from runners.engines.engine import ShouldStop, interruptible, never
from runners.engines.rollouts import turn_starts
from runners.environments.chat_turns import LONGEST, ChatTurns
from runners.environments.instances import failure
from runners.environments.tool_calls import CallReader, Tool, ToolCall
from runners.errors import did_you_mean
from runners.rewards.experience import COUNTS, FinishedEpisode
from runners.user_code.process import THREAD, TOGETHER, Outcome
from runners.user_code.worker import Calls


@attrs.define(eq=False)
class Episode:
    """One row's conversation with its environment."""

    example: Example
    environment: int | None = None  # number; None means no environment, or that `reset` failed
    messages: list[Message] = attrs.field(factory=list)  # messages after the prompt
    counts: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(COUNTS, 0))
    fault: str = ""  # why the episode has no reward; empty if it has one
    seconds: float = 0.0  # total duration of the episode's calls
    hung: bool = False  # a call exceeded its time limit and may still change the environment


@attrs.define(eq=False, kw_only=True)
class Home:
    """A run's tools, and the settings that all its episodes share."""

    config: EnvConfig
    calls: Calls
    tools: dict[str, Tool]  # by name
    chat: ChatTurns  # converts observations to tokens
    reader: CallReader
    nudge: str  # text that starts each row's first turn
    thoughts: tuple[str, ...]  # the tags around thoughts; calls inside them are ignored


@attrs.define(eq=False)
class Session:
    """Implements `grpo_fn.rollout.Replies` for one rollout: parses calls, submits them for
    execution, and tokenizes the observations.
    """

    episodes: Sequence[Episode]  # one episode per row, already started
    prompts: Sequence[tuple[int, ...]]  # one prompt per row
    _home: Home
    _should_stop: ShouldStop = never
    # For each row that waits for a reply: its turn's tokens, and the names of calls beyond the
    # limit.
    _turns: dict[int, tuple[Sequence[int], list[str]]] = attrs.field(factory=dict, init=False)

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        """See `Replies`. A turn without a call, or a turn that reaches the limit, ends the
        conversation.
        """
        episode = self.episodes[row]
        limits = self._home.config
        known = self._home.tools
        calls = self._read(episode, tokens)
        if not calls or episode.fault or episode.counts["turns"] >= limits.max_turns:
            return False
        used = episode.counts["calls"]
        room = max(limits.max_tool_calls - used, 0) if limits.max_tool_calls else len(calls)
        episode.counts["calls"] += len(calls)
        self._turns[row] = tokens, [call.name for call in calls[room:]]
        made = [(call.name, self._fault(call) or call.arguments) for call in calls[:room]]
        tools = [known.get(call.name) for call in calls[:room]]
        mode = TOGETHER if tools and all(tool and tool.is_async for tool in tools) else THREAD
        self._home.calls.submit(
            row,
            "runners.environments.instances:call",
            episode.environment,
            made,
            limits.max_observation_tokens * LONGEST + 1,
            timeout=limits.timeout,
            mode=mode,
        )
        return True

    def collect(self, least: int) -> Mapping[int, Sequence[int] | None]:
        """See `Replies`. Raises Interrupted if `should_stop` ends the wait."""
        outcomes = self._home.calls.collect(least, interruptible(self._should_stop))
        return {row: self._reply(row, outcome) for row, outcome in outcomes.items()}

    def finish(self, rollout: g.Rollout) -> list[FinishedEpisode]:
        """Collects the data for rewards and the log, after the rollout."""
        finished = []
        rows = zip(self.episodes, rollout.completions(), rollout.sampled(), strict=True)
        for episode, tokens, sampled in rows:
            begins = turn_starts(sampled)
            if len(begins) > episode.counts["turns"]:  # the last turn reached the length limit
                self._read(episode, tokens[begins[-1] :])
            while episode.messages and episode.messages[-1]["role"] == "tool":
                episode.messages.pop()  # there was no room for an answer
            finished.append(
                FinishedEpisode(
                    messages=episode.messages,
                    environment=episode.environment,
                    counts=episode.counts,
                    fault=episode.fault,
                    sampled=[*compress(tokens, sampled)],
                    seconds=episode.seconds,
                )
            )
        return finished

    def _read(self, episode: Episode, tokens: Sequence[int]) -> list[ToolCall]:
        lead = episode.example.opening + ("" if episode.messages else self._home.nudge)
        thoughts, said = split_thoughts(
            lead + self._home.chat.decoder.decode(tokens), self._home.thoughts
        )
        if not thoughts:  # the text starts with the nudge, which is not part of a call
            thoughts = lead
            said = (said or "").removeprefix(lead)
        content, calls = ("", []) if said is None else self._home.reader.read(said)
        message: Message = {"role": "assistant", "content": thoughts + content}
        if calls:
            message["tool_calls"] = [call.message() for call in calls]
        episode.messages.append(message)
        episode.counts["turns"] += 1
        return calls

    def _fault(self, call: ToolCall) -> str:
        """Returns the reason why a call cannot be executed, or an empty text."""
        if call.fault or call.name in self._home.tools:
            return call.fault
        return f"there is no tool {call.name}{did_you_mean(call.name, list(self._home.tools))}"

    def _reply(self, row: int, outcome: Outcome) -> Sequence[int] | None:
        episode = self.episodes[row]
        tokens, refused = self._turns.pop(row)
        episode.seconds += outcome.seconds
        if outcome.ended:  # the call may still be running, or its process ended
            episode.counts["timeouts"] += outcome.timed_out
            episode.hung = True
        limits = self._home.config
        observations = []
        used_up = f"not called: a conversation can have at most {limits.max_tool_calls} tool calls"
        results = [("tool", outcome.fault, True)] if outcome.fault else outcome.value
        for name, text, failed in (*results, *(failure(name, used_up) for name in refused)):
            episode.counts["failures"] += failed
            shown, shortened = self._home.chat.cut(text, limits.max_observation_tokens)
            episode.counts["cut"] += shortened
            observations.append({"role": "tool", "name": name, "content": shown})
            if failed and limits.on_error == "no_reward":
                episode.fault = f"{name}: {text}"
                return None
        episode.messages += observations
        return self._home.chat.follow(tokens, observations)
