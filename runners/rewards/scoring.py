"""Runs the rewards over a batch of completions, and checks their results.

A reward that fails gives no reward (NaN) and a line; no fault of a reward is silent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import attrs
import numpy as np

from runners.config.names import REWARD_ARGUMENTS
from runners.errors import RewardError, show
from runners.rewards.calls import NO_RUN, RewardLog, TrainerState, run
from runners.rewards.functions import Reward, UserFunction, check_columns, resolve_rewards
from runners.user_code.process import MAIN, TOGETHER, Outcome, is_async
from runners.user_code.worker import Calls

__all__ = ["Reward", "Scorer", "Scores", "check_columns", "resolve_rewards"]


@attrs.frozen
class Failed:
    """Why a reward failed at every completion."""

    line: str
    ended: bool = False  # its call was too slow, or ended its process; another may be fine


@attrs.frozen(eq=False)
class Scores:
    """The rewards' results."""

    values_kb: np.ndarray  # float64 [K, B]: reward × completion, before weights; NaN = no reward
    problems: list[str]  # one line for each fault, in the order of the rewards
    failed: dict[int, Failed]  # rewards that failed at every completion: index -> the first fault
    extras: dict[str, list[Any]] = attrs.field(factory=dict)  # columns that rewards logged, B entries each
    metrics: dict[str, list[float]] = attrs.field(factory=dict)  # numbers that rewards logged


@attrs.define(eq=False)
class Scorer:
    """The rewards of a run, and a time limit for calls in the process of user code: seconds; 0: none.

    Other functions are called in the caller's thread, without a limit. `on_error` says what a problem does:
    "skip" reports it in `Scores.problems` and goes on without that reward, "raise" makes it a RewardError.
    """

    rewards: Sequence[Reward]
    timeout: float = 60.0
    on_error: Literal["skip", "raise"] = "skip"
    _calls: Calls | None = attrs.field(default=None, init=False)

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
    ) -> Scores:
        """Call every reward on B completions; those of one prompt follow one another.

        `texts`, `prompts`, each of `columns` and `completion_ids` hold an entry for each completion. A reward
        gets, by name, those arguments of docs/rewards.md that it takes, in lists of its own. With
        `conversations`, the messages of each are its completion; `environments` are passed on unchanged.

        Raises ValueError without rewards, for arguments of different lengths or a reserved name of a column;
        UserError for a reward that needs a column which is not there; RewardError for a problem where
        `on_error` is "raise".
        """
        if not self.rewards:
            raise ValueError("rewards is empty; expected at least one")
        completions = conversations or [[{"role": "assistant", "content": text}] for text in texts]
        known = {"completions": completions, "prompts": prompts, **columns, "completion_ids": completion_ids}
        given = {name: list(entries) for name, entries in known.items() if entries is not None}
        for name in columns:
            if name in REWARD_ARGUMENTS:
                raise ValueError(f"a column is named {name}, which every reward gets; rename the column")
        for name, entries in given.items():
            if len(entries) != len(texts):
                raise ValueError(f"{name} has {len(entries)} entries for {len(texts)} completions")
        check_columns(self.rewards, columns, environments=environments is not None)
        if environments is not None:
            given["environments"] = list(environments)

        every = {**given, "trainer_state": trainer_state}
        outcomes = self._call_all([reward.parameters.pick(every) for reward in self.rewards], len(texts))
        log, problems = RewardLog(len(texts)), list[str]()
        values_kb = np.full((len(outcomes), len(texts)), np.nan)
        failed: dict[int, Failed] = {}
        for k, (reward, outcome) in enumerate(zip(self.rewards, outcomes, strict=True)):
            notes, failures = _read(outcome, reward, values_kb[k], log)
            if notes and self.on_error == "raise":
                raise RewardError(notes[0])
            if notes and failures == len(texts):
                failed[k] = Failed(notes[0], outcome.ended or (outcome.value or {}).get("exited", False))
            problems.extend(notes)
        if self._calls is not None:
            problems += self._calls.worker.notices
            self._calls.worker.notices.clear()
        return Scores(values_kb, problems, failed, log.extras, log.metrics)

    def _call_all(self, called: Sequence[dict[str, Any]], size: int) -> list[Outcome]:
        """The outcome of each reward's call. In the process of user code async ones run together, meanwhile
        the others one after another."""
        outcomes: dict[int, Outcome] = {}
        functions = [reward.function for reward in self.rewards]
        there = {k: each for k, each in enumerate(functions) if isinstance(each, UserFunction)}
        for k, function in there.items():
            if function.is_async:
                self._start(k, function, called[k], size, TOGETHER)
        for k, function in enumerate(functions):
            if not isinstance(function, UserFunction):
                outcomes[k] = Outcome(_called_here(function, called[k], size))
            elif not function.is_async:
                self._start(k, function, called[k], size, MAIN)
                self._wait_for(k, outcomes)
        for k in there:
            self._wait_for(k, outcomes)
        return [outcomes[k] for k in range(len(called))]

    def _start(self, k: int, function: UserFunction, arguments: dict[str, Any], size: int, mode: str) -> None:
        """Starts a call in the process of user code."""
        environments = arguments.pop("environments", None)
        self._calls = self._calls or Calls(function.worker)
        what = ("runners.rewards.calls:score", function.name, arguments, size, environments)
        self._calls.submit(k, *what, timeout=self.timeout, mode=mode)

    def _wait_for(self, k: int, outcomes: dict[int, Outcome]) -> None:
        while self._calls is not None and k not in outcomes:
            outcomes.update(self._calls.collect(1))


def _called_here(function: Callable[..., Any], arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """`calls.run` of a function in this process."""
    if not str(getattr(function, "__module__", "")).startswith("runners."):
        arguments = copy.deepcopy(arguments)  # it is not ours, and might change what the run uses again
    if not is_async(function):
        return run(function, arguments, size)
    with ThreadPoolExecutor(1) as pool:  # the caller may have a running event loop
        return pool.submit(run, function, arguments, size).result()


def _read(outcome: Outcome, reward: Reward, row_b: np.ndarray, log: RewardLog) -> tuple[list[str], int]:
    """Fills one reward's row with the usable values; lines on the others, and for how many completions."""
    prefix, every, found = f"reward {show(reward.name)}", len(row_b), outcome.value
    if outcome.fault:
        return [f"{prefix} {'' if outcome.timed_out else 'failed: '}{outcome.fault}"], every
    if "error" in found:
        return [f"{prefix} failed: {found['error']}"], every
    log.add(found)
    row_b[: len(found["values"])] = found["values"]
    return [f"{prefix} {fault}" for fault in found["faults"]], found["failures"]
