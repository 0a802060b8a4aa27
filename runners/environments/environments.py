"""[env] of a run: its tools and environments, and the rollouts with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import grpo_fn as g
from grpo_fn.checks import TooLong
from grpo_fn.rollout import Replies
from grpo_fn.trees import on_host
from runners.config.sections import DataConfig, EnvConfig
from runners.config.user_functions import resolve_function
from runners.data.prompts import Example, render
from runners.environments.calculator import CalculatorSession, mark_ids
from runners.environments.call_pool import CallPool
from runners.environments.chat_turns import ChatTurns
from runners.environments.episodes import Episode, Limits, Session, begun_episode, begun_prompt
from runners.environments.tool_calls import CallReader
from runners.environments.tools import (
    CALCULATOR,
    Tool,
    check_environment,
    check_reset,
    resolve_tools,
    tool_methods,
    tool_of,
)
from runners.errors import UserError, error_line
from runners.rewards.finished_episodes import FinishedEpisodes
from runners.rewards.functions import Reward
from runners.tokenization.text import TextDecoder

# Takes prompts, G, the replies and tokens that also end a turn; returns completions.
PlayTurns = Callable[[Sequence[Sequence[int]], int, Replies, frozenset[int]], g.Rollout]


@attrs.frozen(eq=False)
class Begun:
    """Episodes ready for their first turns."""

    session: Session | CalculatorSession  # it answers their turns
    prompts: Sequence[tuple[int, ...]]  # of each row
    stops: frozenset[int] = frozenset()  # tokens that also end a turn


@attrs.define(eq=False)
class Environments:
    """The environments of a run. Instances are made when needed, and reused after a `reset`."""

    config: EnvConfig
    factory: Callable[[], Any] | None
    functions: Mapping[str, Callable[..., Any]]  # plain tools
    tools: tuple[Tool, ...]
    tokenizer: Any
    decoder: TextDecoder
    end_ids: frozenset[int]
    nudge: str
    template_kwargs: Mapping[str, Any]
    pool: CallPool
    reward: Reward | None  # the environment's own reward
    _idle: list[Any] = attrs.field(factory=list)  # instances that no episode uses

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the form for a chat template."""
        return [tool.schema for tool in self.tools]

    @property
    def is_calculator(self) -> bool:
        """Whether turns are nanochat's, marked by special tokens."""
        return self.config.factory == CALCULATOR

    def play(
        self,
        examples: Sequence[Example],
        num_generations: int,
        play: PlayTurns,
        agree: Callable[[bool], bool] = lambda differ: differ,
    ) -> tuple[g.Rollout, FinishedEpisodes]:
        """A rollout of G conversations of each example, and their messages and counts.

        The environments of the previous call are reused, so rewards must be finished with them. If `reset`
        makes a group's prompts differ, each row of all groups is played as a separate prompt. `agree(differ)`
        says whether any rank has such a group, if these examples belong to one rank: a row's random draws
        depend on it.
        """
        rows = [example for example in examples for _ in range(num_generations)]
        begun = self.begin(rows)
        prompts, session, size = begun.prompts, begun.session, num_generations
        groups = [prompts[start : start + size] for start in range(0, len(rows), size)]
        differ = any(len(set(group)) > 1 for group in groups)
        if self.factory is not None:
            differ = agree(differ)
        try:
            if not differ:
                rollout = play([group[0] for group in groups], size, session, begun.stops)
            else:
                rollout = play(prompts, 1, session, begun.stops)
                rollout = regrouped(rollout, size) if rows else rollout
        except TooLong as error:
            raise UserError(str(error)) from error
        self.release(begun)
        return rollout, session.finish(rollout)

    def begin(self, rows: Sequence[Example]) -> Begun:
        """Episodes of these rows, after `reset`. They keep their instances until `release`."""
        if self.is_calculator:
            session = CalculatorSession(
                [Episode(example) for example in rows],
                self.tokenizer,
                self.decoder.decode,
                self.config.max_turns,
                self.config.max_tool_calls,
                self.nudge,
            )
            prompts = [example.tokens for example in rows]
            return Begun(session, prompts, frozenset({mark_ids(self.tokenizer)[1]}))
        episodes, prompts = self._begun(rows)
        limits = Limits(
            self.config.max_turns,
            self.config.max_tool_calls,
            self.config.max_observation_tokens,
            self.config.on_error == "no_reward",
        )
        reader = CallReader.of(self.tokenizer, self.schemas)
        return Begun(Session(episodes, reader, self.chat, self.pool, limits, self.nudge), prompts)

    def release(self, begun: Begun) -> None:
        """The episodes are over: their instances may be reset for others, except those with hanging calls."""
        episodes = begun.session.episodes
        self._idle += [e.environment for e in episodes if e.environment is not None and not e.hung]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise UserError if the environment's `reset` does not take the data's columns."""
        for instance in self._idle[:1]:
            check_reset(instance, columns, f"env.factory {self.config.factory}")

    @property
    def chat(self) -> ChatTurns:
        """How observations become tokens."""
        return ChatTurns(self.tokenizer, self.schemas, self.template_kwargs, self.end_ids, self.decoder)

    def _begun(self, rows: Sequence[Example]) -> tuple[list[Episode], list[tuple[int, ...]]]:
        """Episodes after `reset`, and each one's prompt."""
        if self.factory is None:
            return [begun_episode(row, None, self.functions) for row in rows], [row.tokens for row in rows]
        for number, example in enumerate(rows):
            self._submit_reset(number, self._idle.pop() if self._idle else None, example)
        outcomes: dict[int, Any] = {}
        while len(outcomes) < len(rows):
            outcomes |= self.pool.collect(1)
        episodes, prompts = [], []
        for number, example in enumerate(rows):
            outcome = outcomes[number]
            environment, observation = (None, None) if outcome.fault else outcome.value
            episode = begun_episode(example, environment, self.functions)
            if outcome.fault:
                episode.fault = f"reset: {outcome.fault}"
            _, tokens = begun_prompt(
                example, observation, self.tokenizer, self.nudge, self.schemas, self.template_kwargs
            )
            episodes.append(episode)
            prompts.append(tokens)
        return episodes, prompts

    def _submit_reset(self, number: int, instance: Any, example: Example) -> None:
        factory, columns = self.factory, dict(example.columns)
        assert factory is not None

        async def reset_later(environment: Any) -> tuple[Any, Any]:
            return environment, await environment.reset(**columns)

        def reset() -> Any:
            environment = factory() if instance is None else instance
            if inspect.iscoroutinefunction(environment.reset):
                return reset_later(environment)
            return environment, environment.reset(**columns)

        self.pool.submit(number, reset)


def build_environments(
    env: EnvConfig,
    data: DataConfig,
    tokenizer: Any,
    decoder: TextDecoder,
    end_ids: Sequence[int],
    folders: Sequence[Path],
) -> Environments | None:
    """The environments of [env]; None if it names none.

    One instance is made to inspect its tools.

    Raises UserError for a factory or tool that cannot be found, made or described to a model.
    """
    if not env.factory and not env.tools:
        return None
    functions = resolve_tools(env.tools, folders)
    pool = CallPool(env.workers, env.timeout)
    factory, first, reward = None, None, None
    methods: dict[str, Callable[..., Any]] = {}
    if env.factory == CALCULATOR:
        mark_ids(tokenizer)
        if functions:
            raise UserError(f'env.tools has functions, which env.factory = "{CALCULATOR}" does not call')
    elif env.factory:
        key = f"env.factory {env.factory}"
        factory = resolve_function(env.factory, folders, key="env.factory", takes=(), classes=True)
        pool.submit(0, factory)
        (outcome,) = pool.collect(1).values()
        if outcome.fault:
            raise UserError(f"{key} cannot be made: {outcome.fault}")
        first = outcome.value
        check_environment(first, key)
        methods = tool_methods(first)
        twice = sorted(methods.keys() & functions.keys())
        if twice:
            raise UserError(f"{key} has a method {twice[0]}, and env.tools a function of that name")
        reward = environment_reward(type(first))
    tools = [tool_of(function, name, "env.tools") for name, function in functions.items()]
    tools += [tool_of(method, name, f"env.factory {env.factory}") for name, method in methods.items()]
    made = Environments(
        env,
        factory,
        functions,
        tuple(tools),
        tokenizer,
        decoder,
        frozenset(end_ids),
        data.nudge,
        data.chat_template_kwargs,
        pool,
        reward,
    )
    if first is not None:
        made._idle.append(first)
    if not made.is_calculator:
        _check_follows(made)
    return made


def environment_reward(kind: type) -> Reward | None:
    """The reward of a class with `get_reward`, named like the class; a failure affects one environment."""
    method = getattr(kind, "get_reward", None)
    if not callable(method):
        return None

    if inspect.iscoroutinefunction(method):

        async def get_rewards(environments: Sequence[Any]) -> list[Any]:
            return [await each.get_reward() if type(each) is kind else None for each in environments]

        return Reward(kind.__name__, get_rewards)

    def get_reward(environments: Sequence[Any]) -> list[Any]:
        return [each.get_reward() if type(each) is kind else None for each in environments]

    return Reward(kind.__name__, get_reward)


def all_rewards(rewards: Sequence[Reward], environments: Environments | None) -> tuple[Reward, ...]:
    """The config's rewards and the environment's. UserError if there are none, or one lacks an argument."""
    for reward in rewards:
        if environments is None and "environments" in reward.needs:
            raise UserError(
                f"reward {reward.name} takes environments, and there are none: set env.factory or env.tools"
            )
    own = () if environments is None or environments.reward is None else (environments.reward,)
    if not rewards and not own:
        raise UserError(
            "reward.functions is empty, and the environment has no get_reward; wanted one reward at least"
        )
    return (*rewards, *own)


def regrouped(rollout: g.Rollout, num_generations: int) -> g.Rollout:
    """A rollout of P·G prompts, one completion each, as P groups. A group's prompt is the shared start of its
    prompts.

    The rest of a prompt is put in front of its completion, as given tokens.
    """
    import mlx.core as mx

    size = num_generations
    prompts, heads = [], []
    for start in range(0, len(rollout.prompts), size):
        group = rollout.prompts[start : start + size]
        shared = _shared_length(group)
        prompts.append(group[0][:shared])
        heads += [list(prompt[shared:]) for prompt in group]
    tokens, sampled = rollout.completions(), rollout.sampled()
    lengths = [len(head) + len(row) for head, row in zip(heads, tokens, strict=True)]
    width = max(1, *lengths)

    def padded(
        parts: Sequence[Sequence[float]], dtype: mx.Dtype, fill: Sequence[Sequence[float]]
    ) -> mx.array:
        rows = [[*head, *part] for head, part in zip(fill, parts, strict=True)]
        return mx.array([[*row, *[0] * (width - len(row))] for row in rows], dtype)

    zeros = [[0.0] * len(head) for head in heads]
    logp = [row[: len(part)] for row, part in zip(on_host(rollout.logp_bt), tokens, strict=True)]
    entropy = None
    if rollout.entropy_bt is not None:
        found = [row[: len(part)] for row, part in zip(on_host(rollout.entropy_bt), tokens, strict=True)]
        entropy = padded(found, mx.float32, zeros)
    return g.Rollout(
        prompts=tuple(prompts),
        num_generations=size,
        tokens_bt=padded(tokens, mx.int32, heads),
        lengths_b=mx.array(lengths, mx.int32),
        logp_bt=padded(logp, mx.float32, zeros),
        finished_b=rollout.finished_b,
        entropy_bt=entropy,
        vocabulary=rollout.vocabulary,
        sampled_bt=padded(sampled, mx.bool_, zeros),
    )


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all prompts share at their start."""
    shortest = min(map(len, prompts))
    same = (len({prompt[n] for prompt in prompts}) == 1 for n in range(shortest))
    count = 0
    for equal in same:
        if not equal:
            break
        count += 1
    if count == 0:
        raise UserError("the prompts of a group have no first token in common: a template begins with one")
    return count


def _check_follows(environments: Environments) -> None:
    """Raise UserError if the chat template cannot show the tools, or cannot continue after a call."""
    asked = ({"role": "user", "content": "a question"},)
    try:
        render(
            environments.tokenizer,
            asked,
            tools=environments.schemas,
            template_kwargs=environments.template_kwargs,
        )
        name = environments.tools[0].name if environments.tools else "tool"
        environments.chat.follow((), [{"role": "tool", "name": name, "content": "1"}])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the tokenizer's chat template fails with tools: {error_line(error)}") from error
