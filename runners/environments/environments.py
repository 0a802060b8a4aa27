"""Tools and environments that a config names ([env]), and rollouts with them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.checks import TooLong
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import flat
from runners.config.loading import Config
from runners.config.sections import DataConfig, EnvConfig
from runners.data.prompts import Example, repeated
from runners.data.rendering import render
from runners.engines.engine import Engine, Request, ShouldStop, interruptible, never
from runners.engines.rollouts import Cancelled, converse, seeds_of
from runners.environments.chat_turns import ChatTurns
from runners.environments.episodes import Episode, Home, Session
from runners.environments.tool_calls import CallReader, Tool, mark_ids
from runners.errors import UserError
from runners.rewards.calls import GET_REWARD, GET_TURN_REWARDS, Parameters
from runners.rewards.experience import FinishedEpisode
from runners.rewards.scoring import Reward, Scorer, UserFunction, load_reward, resolve_rewards
from runners.tokenization.text import TextDecoder
from runners.user_code.process import THREAD, Outcome
from runners.user_code.worker import Calls, Worker

_INSTANCES = "runners.environments.instances"  # the module that contains the worker's operations
_numbers = itertools.count()  # assigns numbers to environments


class Player(Protocol):
    """Plays a run's conversations, with environments that reply or with programs that contain the
    loop.
    """

    reward: Reward | None  # the player's own reward
    turn_reward: Reward | None  # sums an episode's turn rewards

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """Schemas of the tools that prompts show."""
        ...

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises UserError if the player does not accept the data's columns."""
        ...

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
        """Samples G conversations per example. Returns the rollout and the finished episodes.

        Completion g for example n uses the random stream (key, n, g). `numbers` contains each
        example's number n; None means 0, 1, 2, … Raises Cancelled if `should_stop` ended the
        sampling.
        """
        ...


@attrs.define(eq=False, kw_only=True)
class Environments(Home):
    """A run's environments. Instances are created when needed, and reused after `reset`.

    The instances exist in the user code's process and are addressed by number.
    """

    reward: Reward | None  # the environment's own reward
    turn_reward: Reward | None  # sums an episode's turn rewards
    _idle: list[int] = attrs.field(alias="idle")  # instances that no episode is using
    _hung: list[int | None] = attrs.field(factory=list)  # instances that must not be used again

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """See `Player`."""
        return self.chat.schemas

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
        """See `Player`. The previous call's environments are reused, so compute its rewards
        first.
        """
        rows = repeated(examples, sampling.num_generations)
        seeds = flat(seeds_of(key, numbers or range(len(examples)), sampling))
        try:
            session = self.begin(rows, should_stop)
        except Interrupted:
            raise Cancelled(converse(engine, (), sampling, self.begin(()))) from None
        requests = [
            Request(prompt=prompt, seeds=(seed,))
            for prompt, seed in zip(session.prompts, seeds, strict=True)
        ]
        sampling = attrs.evolve(
            sampling, eos_ids=sampling.eos_ids | frozenset(self.chat.mark_ids[1:2])
        )
        try:
            rollout = converse(
                engine,
                requests,
                sampling,
                session,
                together=self.config.schedule == "together",
                should_stop=should_stop,
            )
        except TooLong as error:
            raise UserError(str(error)) from error
        finally:
            self.release(session)
        return rollout, session.finish(rollout)

    def own_rewards(self, played: Sequence[FinishedEpisode]) -> list[float | None] | None:
        """Returns the environments' own rewards, with None for an episode that has no reward.
        Returns None instead of a list if the class has no `get_reward`.
        """
        if self.reward is None:
            return None
        scores = Scorer([self.reward], self.config.timeout).score(
            [""] * len(played),
            [[]] * len(played),
            {},
            environments=[each.environment for each in played],
        )
        rows = zip(scores.values_kb[0].tolist(), played, strict=True)
        return [None if each.fault or value != value else value for value, each in rows]

    def begin(self, rows: Sequence[Example], should_stop: ShouldStop = never) -> Session:
        """Starts an episode for each row, calls `reset`, and returns the session for these
        episodes. Episodes keep their instances until `release`.

        `should_stop` is checked during the wait for calls. Raises Interrupted if it returns True.
        """
        episodes = [Episode(row) for row in rows]
        prompts = [row.tokens for row in rows]
        if self.config.factory:
            prompts = self._reset(episodes, should_stop)
        return Session(episodes, prompts, self, should_stop)

    def release(self, session: Session) -> None:
        """Ends a session's episodes. Each instance may be reset for another episode, unless one of
        its calls hangs.
        """
        for episode in session.episodes:
            if episode.environment is not None:
                (self._hung if episode.hung else self._idle).append(episode.environment)

    def check_columns(self, columns: Iterable[str]) -> None:
        """See `Player`; the columns are passed to `reset`."""
        if self.config.factory:
            _asked(self.calls, self.config, "check_columns", self._idle[0], list(columns))

    def _reset(self, episodes: Sequence[Episode], should_stop: ShouldStop) -> list[tuple[int, ...]]:
        """Calls `reset` for each episode, in its own instance. Returns the prompts, which contain
        the text that `reset` returned.
        """
        self._drop_hung()
        for row, episode in enumerate(episodes):
            episode.environment = self._idle.pop() if self._idle else next(_numbers)
            self.calls.submit(
                row,
                f"{_INSTANCES}:reset",
                episode.environment,
                dict(episode.example.columns),
                timeout=self.config.timeout,
            )
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(episodes):
            outcomes |= self.calls.collect(1, interruptible(should_stop))
        prompts = []
        for row, episode in enumerate(episodes):
            outcome = outcomes[row]
            if outcome.fault:
                episode.fault = f"reset: {outcome.fault}"
                self._hung.append(episode.environment)
                episode.environment = None
            prompts.append(self._prompt(episode.example, outcome.value))
        self._drop_hung()
        return prompts

    def _drop_hung(self) -> None:
        if self._hung:
            self.calls.worker.submit(f"{_INSTANCES}:drop", self._hung, mode=THREAD)
        self._hung = []

    def _prompt(self, example: Example, greeting: str | None) -> tuple[int, ...]:
        """Tokenizes an example's prompt, with a greeting appended to its last message."""
        if not greeting:
            return example.tokens
        *before, last = example.messages
        _, tokens = render(
            self.chat.tokenizer,
            (*before, {**last, "content": f"{last['content']}{greeting}"}),
            self.nudge,
            tools=self.chat.schemas,
            template_kwargs=self.chat.template_kwargs,
        )
        return tokens


def _import_tools(load: Callable[..., Any], env: EnvConfig, folders: Iterable[str | Path]) -> None:
    """Imports the factory and tools that [env] names. `load` is `Worker.load` or
    `Worker.preload`.
    """
    if env.factory or env.tools:
        load(
            f"{_INSTANCES}:load",
            env.factory,
            tuple(env.tools),
            tuple(map(str, folders)),
        )


def start_worker(config: Config) -> Worker:
    """Returns the worker for the code that a config names. If the config names any, the process
    starts now and imports the code.
    """
    worker = Worker()
    for name in config.reward.functions if config.reward.timeout else ():
        if ":" in name:
            load_reward(worker.preload, name, config.folders)
    _import_tools(worker.preload, config.env, config.folders)
    return worker


def load_code(config: Config, worker: Worker) -> tuple[Reward, ...]:
    """Imports the code that a config names, and returns the config's rewards. Custom rewards are
    imported in the worker, or in this process if reward.timeout is 0. Raises UserError if an import
    fails.
    """
    reward = config.reward
    rewards = resolve_rewards(
        reward.functions,
        reward.weights,
        config.folders,
        worker if reward.timeout else None,
        config.answer_form,
    )
    _import_tools(worker.load, config.env, config.folders)
    return rewards


def build_environments(
    env: EnvConfig,
    data: DataConfig,
    tokenizer: Any,
    decoder: TextDecoder,
    end_ids: Sequence[int],
    folders: Sequence[Path],
    worker: Worker,
) -> Environments | None:
    """Builds the environments that [env] names, or returns None if there are none. Their code runs
    in `worker`.

    One instance is created to inspect its tools. Raises UserError if a factory or tool cannot be
    found, created or described to a model.
    """
    if not env.factory and not env.tools:
        return None
    calls = Calls(worker, env.workers)
    _import_tools(worker.load, env, folders)
    first = next(_numbers)
    found = _asked(calls, env, "describe", first)
    tools = {name: Tool(name, *about) for name, *about in found["tools"]}
    marks = mark_ids(tokenizer) if len(tools) == 1 else ()
    schemas = [tool.schema for tool in tools.values()]
    chat = ChatTurns(
        tokenizer,
        [] if marks else schemas,  # nanochat's template cannot show schemas
        data.chat_template_kwargs,
        frozenset(end_ids),
        decoder,
        marks,
    )
    chat.check(next(iter(tools), "tool"))
    takes = {GET_REWARD: ("environments",), GET_TURN_REWARDS: ("environments", "log_extra")}
    rewards = {
        method: Reward(name, UserFunction(worker, method, Parameters(takes[method], takes[method])))
        for method, name in found["rewards"].items()
    }
    return Environments(
        config=env,
        calls=calls,
        tools=tools,
        chat=chat,
        reader=CallReader.of(tokenizer, schemas, marked=bool(marks)),
        nudge=data.nudge,
        thoughts=data.thoughts,
        reward=rewards.get(GET_REWARD),
        turn_reward=rewards.get(GET_TURN_REWARDS),
        idle=[first] if env.factory else [],
    )


def _asked(calls: Calls, env: EnvConfig, operation: str, number: int, *arguments: Any) -> Any:
    """Runs an operation on an environment before the first episode. Raises UserError if the
    operation fails or reaches its time limit.
    """
    key = f"env.factory {env.factory}"
    calls.submit(0, f"{_INSTANCES}:{operation}", number, *arguments, key, timeout=env.timeout)
    (outcome,) = calls.collect(1).values()
    if outcome.fault:
        raise UserError(
            outcome.fault if outcome.refused else f"{key} cannot be created: {outcome.fault}"
        )
    return outcome.value


def all_rewards(rewards: Sequence[Reward], environments: Player | None) -> tuple[Reward, ...]:
    """Returns the config's rewards, then the environment's own reward, then the reward of turns.
    Raises UserError if there are no rewards, or if a reward accepts `environments` but runs in this
    process.
    """
    for reward in rewards:
        if "environments" in reward.parameters.needed and not isinstance(
            reward.function, UserFunction
        ):
            raise UserError(
                f"reward {reward.name} accepts environments, which exist only in the user-code "
                f"process: expected reward.timeout above 0, found 0 (rewards then run in the run's "
                f"own process)"
            )
    found = () if environments is None else (environments.reward, environments.turn_reward)
    whole = (*rewards, *filter(None, found))
    if not whole:
        raise UserError(
            "reward.functions is empty, and the environment has no get_reward; expected at least "
            "one reward"
        )
    return whole
