"""Finds the function for a reward's name in the config, and checks it before anything is loaded."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.config.sections import REWARD_ARGUMENTS, JudgeConfig, judge_of
from runners.config.user_functions import FUNCTION_FORMS, resolve_function
from runners.errors import UserError, did_you_mean, listed, show
from runners.judges import build_judge
from runners.rewards.builtin import REWARDS

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _nothing() -> None: ...


@attrs.frozen(eq=False)
class Reward:
    """One reward: its name in logs, its function (plain or async, called with keywords only), its weight."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    timeout: float | None = None  # its own limit in seconds; None: the scorer's
    grouped: bool = False  # whether it gets the number of completions of a prompt, as `group_size`
    check: Callable[[], None] = _nothing  # of a judge: raises UserError if it cannot judge

    def pick(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The available arguments that the function takes: all of them if it has ``**kwargs``."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return dict(available)
        taken = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
        return {name: value for name, value in available.items() if name in taken}

    @property
    def needs(self) -> tuple[str, ...]:
        """The parameters that the function cannot be called without."""
        return tuple(
            parameter.name
            for parameter in inspect.signature(self.function).parameters.values()
            if parameter.kind in _BY_NAME and parameter.default is parameter.empty
        )


def resolve_rewards(
    names: Sequence[str],
    weights: Sequence[float] = (),
    base_dirs: Iterable[str | Path] = (),
    judges: Mapping[str, JudgeConfig] | None = None,
) -> tuple[Reward, ...]:
    """The rewards of a config, in order; without weights each has 1.0. `judges` are its tables [judge.NAME].

    A reward's name in logs is its function's; if two functions share a name, their full texts are used.
    Raises UserError for a reward that cannot be resolved or is named twice, and for weights that are not one
    finite number per reward.
    """
    if not names:
        raise UserError("reward.functions is empty; wanted one reward at least")
    if weights and len(weights) != len(names):
        raise UserError(
            f"reward.weights has {len(weights)} entries for {len(names)} functions; wanted one each or none"
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise UserError(f"reward.weights holds {weight}; wanted finite numbers")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"reward.functions names {show(name)} twice; wanted each once")
    dirs = tuple(base_dirs)
    rewards = [
        resolve_reward(name, dirs, weight, judges)
        for name, weight in zip(names, weights or [1.0] * len(names), strict=True)
    ]
    short = [reward.name for reward in rewards]
    return tuple(
        attrs.evolve(reward, name=full) if short.count(reward.name) > 1 else reward
        for reward, full in zip(rewards, names, strict=True)
    )


def resolve_reward(
    name: str,
    base_dirs: Iterable[str | Path] = (),
    weight: float = 1.0,
    judges: Mapping[str, JudgeConfig] | None = None,
) -> Reward:
    """The reward for a name: a built-in one, ``package.module:function``, ``a/file.py:function``, or
    ``judge.NAME``, if `judges` has the name.

    Files and modules are searched as in `resolve_function`. Raises UserError, in one line, for an unknown
    name, for faults that `resolve_function` reports, for a signature without `completions`, and if the
    function has a `check_ready` which finds that something is missing.
    """
    judge = judge_of(name)
    if judge is not None and judge in (judges or {}):
        built = build_judge(judge, (judges or {})[judge])
        return Reward(built.name, built.function, weight, built.timeout, built.grouped, built.check)
    if ":" not in name:
        if name in REWARDS:
            return Reward(name, REWARDS[name], weight)
        raise UserError(
            f"reward {show(name)} is not a built-in one ({', '.join(REWARDS)}); one's own is written "
            f"{FUNCTION_FORMS}{did_you_mean(name, REWARDS)}"
        )
    function = resolve_function(name, base_dirs, key="reward")
    attribute = name.rpartition(":")[2]
    _check_signature(name, attribute, function)
    getattr(function, "check_ready", lambda: None)()
    return Reward(attribute, function, weight)


def check_judges(rewards: Iterable[Reward]) -> None:
    """Raises UserError if a judge among the rewards does not answer, has no key, or is not a classifier."""
    for reward in rewards:
        reward.check()


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Raise UserError if a reward needs a column that the data lacks, naming it and the nearest one."""
    found = sorted(set(columns))
    for reward in rewards:
        for needed in reward.needs:
            if needed not in found and needed not in REWARD_ARGUMENTS:
                raise UserError(
                    f"reward {show(reward.name)} needs the column {needed}; the data has {listed(found)}"
                    f"{did_you_mean(needed, found)}"
                )


def _check_signature(name: str, attribute: str, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_name = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = any(
        parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
        for parameter in parameters
    )
    if positional or not (any_name or {"completions", "environments"} & {*by_name}):
        raise UserError(
            f"reward {show(name)}: the signature is {attribute}{signature}; arguments are passed by name, so "
            f"wanted {attribute}(completions, ...)"
        )
