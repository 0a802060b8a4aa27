"""Finds rewards by name, checks them before anything is loaded, calls them on a batch, and reads
their results.

A failed reward gives NaN (no reward) and a message; no failure is silent.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from runners.answers.forms import AnswerForm
from runners.answers.thoughts import TAGS
from runners.config.names import REWARD_ARGUMENTS
from runners.config.user_functions import FUNCTION_FORMS
from runners.errors import RewardError, UserError, did_you_mean, listed, show
from runners.rewards.builtin import REWARDS, built_in
from runners.rewards.calls import (
    NO_RUN,
    Parameters,
    RewardLog,
    TrainerState,
    nothing,
    ready_function,
    run,
)
from runners.user_code.process import MAIN, TOGETHER, Outcome, is_async
from runners.user_code.worker import Calls, Worker


@attrs.frozen(eq=False)
class UserFunction:
    """A reward function in the user-code process, where the scorer calls it."""

    worker: Worker
    name: str  # the name under which it is loaded there
    parameters: Parameters
    is_async: bool = False
    file: str | None = None  # the file it was loaded from


@attrs.frozen(eq=False)
class Reward:
    """One reward: its name in logs, its function (plain or async, called with keywords only) and
    its weight.
    """

    name: str
    function: Callable[..., Any] | UserFunction
    weight: float = 1.0

    @property
    def parameters(self) -> Parameters:
        """The arguments that the function accepts by name."""
        function = self.function
        return (
            function.parameters if isinstance(function, UserFunction) else Parameters.of(function)
        )


def resolve_rewards(
    names: Sequence[str],
    weights: Sequence[float] = (),
    base_dirs: Iterable[str | Path] = (),
    worker: Worker | None = None,
    form: AnswerForm | None = None,
) -> tuple[Reward, ...]:
    """Returns a config's rewards, in order. Without `weights`, each reward has the weight 1.0.

    A name is a built-in one, ``package.module:function``, or ``a/file.py:function``. Rewards that
    are not built in are loaded by the `worker` or, without one, in this process. In logs, a reward
    has its function's name, or its full config name if two functions share a name. Raises UserError
    for an unknown name, and the errors of `ready_function`.
    """
    dirs = tuple(base_dirs)
    rewards = list[Reward]()
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        if ":" not in name:
            if name not in REWARDS:
                raise UserError(
                    f"reward {show(name)} is not built in ({', '.join(REWARDS)}); a custom "
                    f"reward is {FUNCTION_FORMS}{did_you_mean(name, REWARDS)}"
                )
            function = built_in(form)[name]
        elif worker is None:
            function = ready_function(name, dirs)
        else:
            found = load_reward(worker.load, name, dirs)
            takes = Parameters(*found["parameters"])
            function = UserFunction(worker, name, takes, found["is_async"], found["file"])
        rewards.append(Reward(name.rpartition(":")[2], function, weight))
    count = Counter(reward.name for reward in rewards)
    both = zip(rewards, names, strict=True)
    return tuple(
        attrs.evolve(each, name=full) if count[each.name] > 1 else each for each, full in both
    )


def load_reward(load: Callable[..., Any], name: str, base_dirs: Iterable[str | Path]) -> Any:
    """Loads a reward in the user-code process. `load` is `Worker.load` or `preload`."""
    return load("runners.rewards.calls:load", name, tuple(map(str, base_dirs)))


def check_columns(
    rewards: Iterable[Reward], columns: Iterable[str], *, environments: bool = True
) -> None:
    """Raises UserError if a reward needs a column that the data lacks (the message suggests the
    nearest name), or if a reward needs `environments` and there are none.
    """
    found = sorted(set(columns))
    for reward in rewards:
        for needed in reward.parameters.needed:
            if needed == "environments" and not environments:
                raise UserError(
                    f"reward {show(reward.name)} requires environments, but env.factory is not set"
                )
            if needed not in found and needed not in REWARD_ARGUMENTS:
                raise UserError(
                    f"reward {show(reward.name)} requires the column {needed}; the data has "
                    f"{listed(found)}{did_you_mean(needed, found)}"
                )


@attrs.frozen
class Failed:
    """The reason why a reward failed for every completion."""

    line: str
    ended: bool = False  # the call was too slow, or ended its process; another call may succeed


@attrs.frozen(eq=False)
class Scores:
    """The rewards' results."""

    values_kb: np.ndarray  # float64 [K, B]: reward × completion, before weights; NaN = no reward
    problems: list[str]  # one line for each fault, in the order of the rewards
    failed: dict[int, Failed]  # rewards that failed at every completion: index -> the first fault
    # columns that rewards logged, B entries each
    extras: dict[str, list[Any]] = attrs.field(factory=dict)
    metrics: dict[str, list[float]] = attrs.field(factory=dict)  # numbers that rewards logged


@attrs.define(eq=False)
class Scorer:
    """A run's rewards. Calls in the user-code process have a time limit in seconds; 0 means no
    limit.

    Other functions run in the caller's thread, without a limit. `on_error` determines the effect of
    an error: "skip" adds it to `Scores.problems` and continues without that reward, "raise" raises
    a RewardError. `thoughts` are the tags around thoughts in the completions.
    """

    rewards: Sequence[Reward]
    timeout: float = 60.0
    on_error: Literal["skip", "raise"] = "skip"
    thoughts: tuple[str, ...] = TAGS
    # Held by the batch whose plain rewards are running; several batches may wait for async ones.
    _turn: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def _worker(self) -> Worker:
        functions = [reward.function for reward in self.rewards]
        workers = (each.worker for each in functions if isinstance(each, UserFunction))
        return next(workers, Worker())

    def score(
        self,
        texts: Sequence[str],
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = NO_RUN,
        *,
        conversations: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        environments: Sequence[Any] | None = None,
        printed: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> Scores:
        """Calls every reward on B completions. Completions for one prompt are adjacent.

        `texts`, `prompts`, each of `columns` and `completion_ids` contain an entry for each
        completion. A reward receives, by name, those arguments listed in docs/rewards.md that it
        accepts, each as a separate list. With `conversations`, a completion is passed as its list
        of messages. `environments` and `printed` (the values that programs printed) are passed
        unchanged.

        Raises UserError if a reward requires a missing column, and RewardError for a failure if
        `on_error` is "raise".
        """
        check_columns(self.rewards, columns, environments=environments is not None)
        size = len(texts)
        lists = {
            **columns,
            "completions": conversations
            or [[{"role": "assistant", "content": text}] for text in texts],
            "prompts": prompts,
            "completion_ids": completion_ids,
            "environments": environments,
            "printed": printed,
        }
        given = {name: list(entries) for name, entries in lists.items() if entries is not None}
        every = {**given, "trainer_state": trainer_state, "thought_tags": self.thoughts}
        outcomes = self._call_all([reward.parameters.pick(every) for reward in self.rewards], size)
        log = RewardLog(size)
        problems = list[str]()
        values_kb = np.full((len(outcomes), size), np.nan)
        failed: dict[int, Failed] = {}
        for k, (reward, outcome) in enumerate(zip(self.rewards, outcomes, strict=True)):
            found = outcome.value
            if outcome.fault:
                fault = outcome.fault if outcome.timed_out else f"failed: {outcome.fault}"
                found = nothing(size, fault, ended=outcome.ended)
            log.add(found)
            values_kb[k, : len(found["values"])] = found["values"]
            notes = [f"reward {show(reward.name)} {fault}" for fault in found["faults"]]
            if notes and self.on_error == "raise":
                raise RewardError(notes[0])
            if notes and found["failures"] == size:
                failed[k] = Failed(notes[0], found["ended"])
            problems += notes
        problems += self._worker.notices
        self._worker.notices.clear()
        return Scores(values_kb, problems, failed, log.extras, log.metrics)

    def _call_all(self, called: Sequence[dict[str, Any]], size: int) -> list[Outcome]:
        """Calls each reward and returns the outcomes. In the user-code process, async rewards run
        concurrently while the others run one after another.
        """
        outcomes: dict[int, Outcome] = {}
        functions = [reward.function for reward in self.rewards]
        calls = Calls(self._worker)

        def start(k: int, function: UserFunction, mode: str) -> None:
            environments = called[k].pop("environments", None)
            calls.submit(
                k,
                "runners.rewards.calls:score",
                function.name,
                called[k],
                size,
                environments,
                timeout=self.timeout,
                mode=mode,
            )

        for k, function in enumerate(functions):
            if isinstance(function, UserFunction) and function.is_async:
                start(k, function, TOGETHER)
        with self._turn:
            for k, function in enumerate(functions):
                if not isinstance(function, UserFunction):
                    outcomes[k] = Outcome(_called_here(function, called[k], size))
                elif not function.is_async:
                    start(k, function, MAIN)
                    while k not in outcomes:
                        outcomes |= calls.collect(1)
        while len(outcomes) < len(called):
            outcomes |= calls.collect(1)
        return [outcomes[k] for k in range(len(called))]


def _called_here(
    function: Callable[..., Any], arguments: dict[str, Any], size: int
) -> dict[str, Any]:
    """Runs `calls.run` in this process. If the function changes a list, other rewards are not
    affected.
    """
    arguments = {
        name: [*each] if isinstance(each, list) else each for name, each in arguments.items()
    }
    if not is_async(function):
        return run(function, arguments, size)
    with ThreadPoolExecutor(1) as pool:  # the caller may have a running event loop
        return pool.submit(run, function, arguments, size).result()
