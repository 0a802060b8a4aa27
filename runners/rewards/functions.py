"""Finds the function for a reward's name in the config, and checks it before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.answers.forms import AnswerForm
from runners.config.names import REWARD_ARGUMENTS
from runners.config.user_functions import FUNCTION_FORMS
from runners.errors import UserError, did_you_mean, listed, show
from runners.rewards.builtin import REWARDS, built_in
from runners.rewards.calls import Parameters, resolved_function
from runners.user_code.worker import Worker


@attrs.frozen(eq=False)
class UserFunction:
    """A reward's function in a process of user code, where the scorer calls it."""

    worker: Worker
    name: str  # under which it is loaded there
    parameters: Parameters
    is_async: bool = False
    file: str | None = None  # that it was loaded from


@attrs.frozen(eq=False)
class Reward:
    """One reward: its name in logs, its function (plain or async, called with keywords only), its weight."""

    name: str
    function: Callable[..., Any] | UserFunction
    weight: float = 1.0

    @property
    def parameters(self) -> Parameters:
        """What the function takes by name."""
        function = self.function
        return function.parameters if isinstance(function, UserFunction) else Parameters.of(function)


def resolve_rewards(
    names: Sequence[str],
    weights: Sequence[float] = (),
    base_dirs: Iterable[str | Path] = (),
    worker: Worker | None = None,
    form: AnswerForm | None = None,
) -> tuple[Reward, ...]:
    """The rewards of a config, in order; without weights each has 1.0.

    A name is a built-in one, ``package.module:function``, or ``a/file.py:function``. The `worker`, or without
    one this process, loads what is not built in. A reward's name in logs is its function's, or the full text
    if two share a name. Raises UserError for an unknown name, as `resolve_function`, for a signature without
    `completions`, and as the function's `check_ready`, if it has one.
    """
    dirs, rewards = tuple(base_dirs), list[Reward]()
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        short = name.rpartition(":")[2]
        if ":" not in name:
            if name not in REWARDS:
                raise UserError(
                    f"reward {show(name)} is not a built-in one ({', '.join(REWARDS)}); one's own is written "
                    f"{FUNCTION_FORMS}{did_you_mean(name, REWARDS)}"
                )
            function = built_in(form)[name]
        elif worker is None:
            function = resolved_function(name, dirs)
        else:
            found = worker.load(*loading(name, dirs))
            takes = Parameters(*found["parameters"])
            function = UserFunction(worker, name, takes, found["is_async"], found["file"])
        rewards.append(Reward(short, function, weight))
    short_names = [reward.name for reward in rewards]
    return tuple(
        attrs.evolve(reward, name=full) if short_names.count(reward.name) > 1 else reward
        for reward, full in zip(rewards, names, strict=True)
    )


def loading(name: str, base_dirs: Iterable[str | Path]) -> tuple[Any, ...]:
    """The operation that loads a reward, for `Worker.preload`."""
    return "runners.rewards.calls:load", name, tuple(map(str, base_dirs))


def check_columns(rewards: Iterable[Reward], columns: Iterable[str], *, environments: bool = True) -> None:
    """Raise UserError if a reward needs a column that the data lacks, naming it and the nearest one, or
    `environments` where there are none."""
    found = sorted(set(columns))
    for reward in rewards:
        for needed in reward.parameters.needed:
            if needed == "environments" and not environments:
                raise UserError(f"reward {show(reward.name)} needs environments; env.factory names none")
            if needed not in found and needed not in REWARD_ARGUMENTS:
                raise UserError(
                    f"reward {show(reward.name)} needs the column {needed}; the data has {listed(found)}"
                    f"{did_you_mean(needed, found)}"
                )
