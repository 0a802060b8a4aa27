"""Runs the rewards over a batch of completions, and checks their results.

A reward that fails gives no reward (NaN) and a line; no fault of a reward is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from runners.config.sections import REWARD_ARGUMENTS
from runners.errors import RewardError, did_you_mean, show
from runners.rewards.calls import run, run_async
from runners.rewards.functions import Reward, UserFunction, check_columns, resolve_reward, resolve_rewards
from runners.rewards.trl_arguments import NO_RUN, RewardLog, TrainerState, refusal
from runners.user_code.calls import Calls
from runners.user_code.host import MAIN, TOGETHER, Outcome, is_async
from runners.user_code.worker import Here, Worker

__all__ = ["Reward", "Scorer", "Scores", "check_columns", "resolve_reward", "resolve_rewards"]

_ON_ERROR = ("skip", "raise")
_LOGS = ("log_extra", "log_metric")
_PLAIN = {str, int, float, bool, type(None)}


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
    """The rewards of a run and their time limit: seconds a call; 0 = none, called in the caller's thread.

    `on_error` says what a problem does: "skip" reports it in `Scores.problems` and goes on without that
    reward, "raise" makes it a RewardError. `_calls` are those that run, in each place.
    """

    rewards: Sequence[Reward]
    timeout: float = 60.0
    on_error: Literal["skip", "raise"] = "skip"
    _calls: dict[Worker | Here | None, Calls] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.rewards:
            raise ValueError("rewards is empty; wanted one at least")
        if not 0 <= self.timeout < float("inf"):
            raise ValueError(f"timeout is {self.timeout}; wanted seconds, or 0 for no limit")
        if self.on_error not in _ON_ERROR:
            raise ValueError(
                f"on_error is {show(self.on_error)}; wanted {' or '.join(_ON_ERROR)}"
                f"{did_you_mean(str(self.on_error), _ON_ERROR)}"
            )

    def score(
        self,
        texts: Sequence[str],
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = NO_RUN,
        *,
        group_size: int = 1,
        conversations: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        environments: Sequence[Any] | None = None,
    ) -> Scores:
        """Call every reward on B completions; those of one prompt are `group_size` in a row.

        `texts`, `prompts`, each of `columns` and `completion_ids` hold B entries, one for each completion. A
        reward gets, by name, `completions` (``[[{"role": "assistant", "content": text}], …]``) and those of
        `prompts`, `completion_ids`, the columns, `trainer_state`, `log_extra` and `log_metric` that it takes;
        each call gets its own lists. With `conversations`, the messages of each are its completion;
        `environments` are passed on unchanged. Async rewards are awaited together, the others run one after
        another.

        Raises ValueError for arguments of different lengths or a column with a reserved name; UserError for a
        reward that needs a column which is not there; RewardError for a problem where `on_error` is "raise".
        """
        given = {"prompts": prompts, **columns}
        if completion_ids is not None:
            given["completion_ids"] = completion_ids
        for name in columns:
            if name in REWARD_ARGUMENTS:
                raise ValueError(f"a column is named {name}, which every reward gets; rename the column")
        for name, entries in given.items():
            if len(entries) != len(texts):
                raise ValueError(f"{name} has {len(entries)} entries for {len(texts)} completions")
        check_columns(self.rewards, columns, environments=environments is not None)
        if environments is not None:
            given["environments"] = environments
        completions = _wrap(texts) if conversations is None else conversations

        called = []
        for reward in self.rewards:
            arguments = _arguments(reward, completions, given) | reward.pick({"trainer_state": trainer_state})
            called.append(_Called(reward, arguments, list(reward.pick(dict.fromkeys(_LOGS))), len(texts)))
        for each in called:
            if each.reward.grouped:
                each.arguments["group_size"] = group_size
        outcomes = self._call_all(called)
        log = RewardLog(len(texts))
        values_kb = np.full((len(called), len(texts)), np.nan)
        problems: list[str] = []
        failed: dict[int, Failed] = {}
        for k, (each, outcome) in enumerate(zip(called, outcomes, strict=True)):
            notes, failures = self._judge(outcome, each.reward, texts, values_kb[k], log)
            if notes and self.on_error == "raise":
                raise RewardError(notes[0])
            if notes and failures == len(texts):
                failed[k] = Failed(notes[0], outcome.ended or (outcome.value or {}).get("exited", False))
            problems.extend(notes)
        for reward in self.rewards:  # of judges: faults besides their verdicts
            problems += getattr(reward.function, "take_notices", list)()
        for calls in self._calls.values():
            problems += calls.place.notices
            calls.place.notices.clear()
        problems += map(refusal, log.refused)
        return Scores(values_kb, problems, failed, log.extras, log.metrics)

    def _call_all(self, calls: Sequence[_Called]) -> list[Outcome]:
        """The outcome of each call: async ones together, then the others one after another."""
        outcomes: dict[int, Outcome] = {}
        together = [k for k, each in enumerate(calls) if each.is_async]
        for k in together:
            self._start(k, calls[k])
        for k in together:
            while k not in outcomes:
                outcomes.update(self._place(calls[k].reward).collect(1))
        for k, each in enumerate(calls):
            if k in outcomes:
                continue
            if not self._limit(each.reward) and not isinstance(each.reward.function, UserFunction):
                outcomes[k] = Outcome(run(each.reward.function, *each.rest))
                continue
            self._start(k, each)
            outcomes.update(self._place(each.reward).collect(1))
        return [outcomes[k] for k in range(len(calls))]

    def _start(self, k: int, each: _Called) -> None:
        function, calls, limit = each.reward.function, self._place(each.reward), self._limit(each.reward)
        mode = TOGETHER if each.is_async else MAIN
        if isinstance(function, UserFunction):
            environments = each.arguments.pop("environments", None)
            what = (function.name, *each.rest, environments)
            calls.submit(k, "runners.rewards.calls:score", *what, timeout=limit, mode=mode)
        else:
            act = run_async if each.is_async else run
            calls.submit(k, act, function, *each.rest, timeout=limit, mode=mode)

    def _place(self, reward: Reward) -> Calls:
        """The calls of the place where a reward runs."""
        worker = reward.function.worker if isinstance(reward.function, UserFunction) else None
        if worker not in self._calls:
            self._calls[worker] = Calls(worker or Here())
        return self._calls[worker]

    def _limit(self, reward: Reward) -> float:
        return self.timeout if reward.timeout is None else reward.timeout

    def _judge(
        self, outcome: Outcome, reward: Reward, texts: Sequence[str], row_b: np.ndarray, log: RewardLog
    ) -> tuple[list[str], int]:
        """Fill one reward's row with the usable values; lines on the others, and for how many completions."""
        prefix, every = f"reward {show(reward.name)}", len(texts)
        if outcome.timed_out:
            return [f"{prefix} {outcome.fault}"], every
        if outcome.fault:
            return [f"{prefix} failed: {outcome.fault}"], every
        found = outcome.value
        if "error" in found:
            index = found["index"]
            where = "" if index is None else f" at completion {index}, {show(texts[index])}"
            return [f"{prefix} failed{where}: {found['error']}"], every
        log.add(found)
        row_b[: len(found["values"])] = found["values"]
        return [f"{prefix} {fault}" for fault in found["faults"]], found["failures"]


@attrs.frozen(eq=False)
class _Called:
    """A reward and the arguments of its call."""

    reward: Reward
    arguments: dict[str, Any]
    logs: list[str]  # the ways to log that it takes
    size: int  # completions

    @property
    def is_async(self) -> bool:
        """Whether its function is."""
        function = self.reward.function
        return function.is_async if isinstance(function, UserFunction) else is_async(function)

    @property
    def rest(self) -> tuple[Any, ...]:
        """The arguments of `calls.run` after the function."""
        return self.arguments, self.logs, self.size, self.reward.weight


def _arguments(
    reward: Reward, completions: Sequence[Any], given: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The arguments of a reward from completions and columns, as separate lists."""
    picked = reward.pick({"completions": completions, **given})
    if isinstance(reward.function, UserFunction):  # another process gets copies
        return {name: list(entries) for name, entries in picked.items()}
    return {name: _copied(list(entries)) for name, entries in picked.items()}


def _wrap(texts: Sequence[str]) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def _copied(value: Any) -> Any:
    """A copy that shares nothing with the run, which uses its prompts, columns and tokens again later."""
    if isinstance(value, list):
        return value.copy() if _PLAIN.issuperset(map(type, value)) else [_copied(each) for each in value]
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.copy() if isinstance(value, set | bytearray | np.ndarray) else value
