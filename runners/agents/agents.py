"""Agents that a config names ([env] program or taskset), and rollouts with them."""

import importlib.util
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, Protocol

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import flat
from runners.agents.processes import AgentProcess
from runners.agents.tasksets import TaskRun
from runners.config.loading import Config
from runners.config.names import TASKSETS
from runners.config.sections import EnvConfig
from runners.data.datasets import ROWS
from runners.data.messages import Message
from runners.data.prompts import Example, repeated
from runners.engines.engine import Engine, Seed, ShouldStop, never
from runners.engines.rollouts import Cancelled, Talk, grouped, seeds_of, turn_starts
from runners.engines.settings import sampling_of
from runners.environments.environments import Player, build_environments
from runners.errors import UserError, error_line, show
from runners.models.folders import resolve_model
from runners.rewards.calls import TURN_REWARDS
from runners.rewards.experience import COUNTS, FinishedEpisode
from runners.rewards.scoring import Reward
from runners.serve.chat import ServedModel
from runners.serve.service import Limits, Service
from runners.serve.sessions import Session
from runners.tokenization.text import TextDecoder
from runners.user_code.process import Outcome
from runners.user_code.worker import Worker

_HERE = "127.0.0.1"
_BETWEEN = 0.02  # seconds between two checks of the programs


class Program(Protocol):
    """A running episode."""

    @property
    def has_ended(self) -> bool: ...

    def end(self) -> Outcome: ...


# Starts an episode, given the row, the server's address and an API key. Raises OSError if the
# process cannot be started.
Launch = Callable[[Example, str, str], Program]


@attrs.frozen
class NotStarted:
    """A `Program` whose process could not be started."""

    why: str
    has_ended: bool = True

    def end(self) -> Outcome:
        """Returns an outcome with the reason; there is no process to end."""
        return Outcome(fault=f"its program could not be started: {self.why}")


@attrs.define(eq=False)
class Episode:
    """A running program, and its calls to the model."""

    example: Example
    session: Session  # records its calls
    program: Program
    started: float  # by the monotonic clock
    # the outcome's value is the last JSON object that the program printed
    outcome: Outcome = attrs.field(factory=Outcome)
    # the last time when a call was known to be in progress
    _heard: float = attrs.field(
        default=attrs.Factory(lambda self: self.started, takes_self=True), init=False
    )
    # at the last check: the number of calls, and whether one was in progress
    _seen: tuple[int, bool] = (0, False)

    def is_over(self, now: float, timeout: float) -> bool:
        """Returns whether the program has ended. A program that makes no call for `timeout` seconds
        is ended; 0 means no limit.
        """
        calling = any(row.turn is not None for row in [*self.session.rows])
        if calling or self._seen != (self.session.calls, calling):
            self._heard = now
        self._seen = (self.session.calls, calling)
        has_ended = self.program.has_ended
        if not has_ended and not 0 < timeout < now - self._heard:
            return False
        outcome = self.program.end()
        if not has_ended:
            outcome = Outcome(fault=f"timed out after {timeout:g} s without a call", timed_out=True)
        self.outcome = attrs.evolve(outcome, seconds=now - self.started)
        return True

    def talks(self) -> list[Talk]:
        """Returns the episode's rows that contain sampled tokens, in the order in which they
        started.
        """
        return [row.talk for row in self.session.rows if any(row.talk.sampled)]


@attrs.define(eq=False)
class Agents:
    """A `Player` whose episodes are programs that call the model over HTTP."""

    config: EnvConfig
    model: ServedModel
    launch: Launch
    reward: Reward | None  # the printed reward; None means only the config's rewards are used
    turn_reward: Reward | None
    schemas: tuple[dict[str, Any], ...] = ()  # empty, because each call sends its own tools

    def check_columns(self, columns: Iterable[str]) -> None:
        """See `Player`. A program accepts any columns. A taskset requires the column `task`, which
        contains the task's number.
        """
        if self.config.taskset and "task" not in columns:
            raise UserError(
                "env.taskset requires a column `task` in the data, with a task's number"
            )

    def play(
        self,
        engine: Engine,
        examples: Sequence[Example],
        sampling: g.Sampling,
        *,
        key: mx.array,
        numbers: Sequence[int] | None = None,
        should_stop: ShouldStop = never,
    ) -> tuple[g.Rollout, list[FinishedEpisode]]:
        """See `Player`. The rollout contains each episode's last row. An episode's first row uses
        the completion's seed; the seeds of the other rows are derived from it.
        """
        from runners.serve.app import Server  # requires an extra

        size = sampling.num_generations
        seeds = flat(seeds_of(key, numbers or range(len(examples)), sampling))
        rows = list(zip(repeated(examples, size), seeds, strict=True))
        service = Service(
            engine, self.model, Limits(turns=max(len(rows) * self.config.max_turns, 1))
        )
        try:
            with Server(service, _HERE) as server:
                episodes = self._run(service, f"{server.url}/v1", rows, sampling, should_stop)
        except Interrupted:
            raise Cancelled(grouped([], size, with_entropy=sampling.with_entropy)) from None
        groups = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        mains = flat(map(last_rows, groups))
        rollout = grouped(mains, size, with_entropy=sampling.with_entropy)
        return rollout, list(map(self._finished, episodes, mains))

    def _run(
        self,
        service: Service,
        url: str,
        rows: Sequence[tuple[Example, Seed]],
        sampling: g.Sampling,
        should_stop: ShouldStop,
    ) -> list[Episode]:
        """Runs one episode per row, at most env.workers at a time. Raises Interrupted if
        `should_stop` returns True.
        """
        waiting = deque(rows)
        episodes: list[Episode] = []
        running: list[Episode] = []
        sampling = attrs.evolve(sampling, num_generations=1)
        looked = 0.0

        def tend() -> bool:
            nonlocal looked
            now = time.monotonic()
            if now < looked + _BETWEEN:
                return False
            looked = now
            if should_stop():
                raise Interrupted
            for episode in [*running]:
                if episode.is_over(now, self.config.timeout):
                    running.remove(episode)
                    service.close(episode.session)
            while waiting and len(running) < self.config.workers:
                example, seed = waiting.popleft()
                session = service.open(
                    sampling=sampling, seed=seed, most_calls=self.config.max_turns
                )
                try:
                    program = self.launch(example, url, session.key)
                except OSError as error:
                    program = NotStarted(error_line(error))
                running.append(Episode(example, session, program, time.monotonic()))
                episodes.append(running[-1])
            return not running

        together = (lambda: len(running)) if self.config.schedule == "together" else None
        try:
            service.run(tend, together=together)
        finally:
            for episode in running:
                episode.program.end()
        return episodes

    def _finished(self, episode: Episode, main: Talk) -> FinishedEpisode:
        """Collects an episode's data for rewards, the log and the learner."""
        talks = episode.talks()
        messages = self._said(episode, main)
        outcome = episode.outcome
        fault = outcome.fault
        if not fault and self.reward is not None and "reward" not in (outcome.value or {}):
            fault = 'its program printed no line such as {"reward": 1.0}'
        counts = dict.fromkeys(COUNTS, 0) | {
            "turns": sum(len(turn_starts(talk.sampled)) for talk in talks),
            "calls": sum(len(message.get("tool_calls") or ()) for message in messages),
            "timeouts": int(outcome.timed_out),
        }
        return FinishedEpisode(
            messages=messages,
            environment=None,
            counts=counts,
            fault=fault,
            sampled=flat(compress(talk.tokens, talk.sampled) for talk in talks),
            seconds=outcome.seconds,
            earlier=[talk for talk in talks if talk is not main],
            printed=outcome.value,
        )

    def _said(self, episode: Episode, main: Talk) -> list[Message]:
        """Returns the messages of the last chat, starting with the model's first message. Without a
        chat, returns the text that the model sampled in the last row.
        """
        messages = list(episode.session.messages)
        while messages and messages[0]["role"] != "assistant":
            del messages[0]
        text = self.model.decoder.decode([*compress(main.tokens, main.sampled)])
        return messages or [{"role": "assistant", "content": text}]


def last_rows(group: Sequence[Episode]) -> list[Talk]:
    """Returns the last row of each episode in a group. If an episode has no row, or its row starts
    differently from the others, it is represented by a row without tokens.
    """
    lasts = [next(reversed(each.talks()), None) for each in group]
    prompt = next((last.prompt for last in lasts if last), group[0].example.tokens)
    return [
        last if last and last.prompt[0] == prompt[0] else Talk(prompt, (0, 0)) for last in lasts
    ]


def printed_reward(printed: Sequence[Mapping[str, Any] | None]) -> list[Any]:
    """Returns the value that each program printed as its `reward`. A reward function."""
    return [(each or {}).get("reward") for each in printed]


def printed_turn_rewards(
    printed: Sequence[Mapping[str, Any] | None], log_extra: Callable[..., None]
) -> list[float | None]:
    """Returns the sum of the list that each program printed as its `turn_rewards`. A reward
    function. The lists contain a number or None for each call, and are logged as a column.
    """
    found = [(each or {}).get("turn_rewards") for each in printed]
    rows = [row if isinstance(row, list) and all(map(_is_number, row)) else None for row in found]
    log_extra(TURN_REWARDS, rows)
    return [None if row is None else sum(filter(None, row)) for row in rows]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def program_launch(config: Config) -> Launch:
    """Returns a function that starts [env] program. Raises UserError if the program is not
    found.
    """
    first, *arguments = config.env.program
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    found = shutil.which(first, path=path)
    if found is None:
        raise UserError(f"{config.where('env.program')}: no such program: {show(first)}")

    def launch(example: Example, url: str, key: str) -> Program:
        own = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,  # older name for the same address
            "OPENAI_API_KEY": key,
            "PATH": path,
            # A proxy cannot reach this address.
            "NO_PROXY": _HERE,
            "no_proxy": _HERE,
        }
        return AgentProcess([found, *arguments], example.columns, os.environ | own)

    return launch


def taskset_launch(config: Config, worker: Worker, most: int) -> Launch:
    """Returns a function that plays tasks from [env] taskset. Raises UserError if the taskset
    cannot be loaded.
    """
    name = config.env.taskset.removeprefix(TASKSETS)
    worker.load(ROWS, name, tuple(map(str, config.folders)), config.data.max_samples)
    tokenizer = str(resolve_model(config.model.path))

    def launch(example: Example, url: str, key: str) -> Program:
        return TaskRun(worker, name, example.columns["task"], tokenizer, url, key, most)

    return launch


def build_player(
    config: Config, tokenizer: Any, decoder: TextDecoder, eos_ids: Sequence[int], worker: Worker
) -> Player | None:
    """Builds the player that [env] describes, or returns None if completions have only one turn.
    Raises UserError if a program or taskset cannot be found, and the errors of
    `build_environments`.
    """
    if not config.env.agents:
        return build_environments(
            config.env, config.data, tokenizer, decoder, eos_ids, config.folders, worker
        )
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("starlette") is None:
        raise UserError(
            "env.program and env.taskset require the `serve` extra: pip install 'grpo_fn[serve]'"
        )
    env, data, loss = config.env, config.data, config.loss
    new = max(config.rollout.max_new_tokens, config.eval.max_new_tokens)
    by_turn = loss.discount < 1 or loss.baseline == "turn"
    return Agents(
        config=env,
        model=ServedModel(
            name=config.model.path,
            tokenizer=tokenizer,
            decoder=decoder,
            eos_ids=frozenset(eos_ids),
            vocabulary=1 + max(tokenizer.get_vocab().values()),
            length=data.max_prompt_length + new,
            sampling=sampling_of(config, eos_ids),
            template_kwargs=data.chat_template_kwargs,
            nudge=data.nudge,
        ),
        launch=program_launch(config) if env.program else taskset_launch(config, worker, new),
        reward=None if config.reward.functions else Reward("program", printed_reward),
        turn_reward=Reward("turns", printed_turn_rewards) if by_turn else None,
    )
