"""Runs the rewards over a batch of completions, and checks their results.

A reward that fails gives no reward (NaN) and a line; no fault of a reward is silent.
"""

import numbers
from collections.abc import Mapping, Sequence
from decimal import Decimal
from threading import Thread
from typing import Any, Literal

import attrs
import numpy as np

from runners.config.sections import REWARD_ARGUMENTS
from runners.errors import RewardError, did_you_mean, show
from runners.judges import Failure
from runners.rewards.calls import Outcome, call, call_together, is_async, python_value
from runners.rewards.functions import Reward, check_columns, resolve_reward, resolve_rewards
from runners.rewards.trl_arguments import NO_RUN, RewardLog, TrainerState

__all__ = ["Reward", "Scorer", "Scores", "check_columns", "resolve_reward", "resolve_rewards"]

# The most calls of one reward that may hang: each keeps a thread, maybe a core, until the process ends.
_MAX_HANGING = 4
_ON_ERROR = ("skip", "raise")
_LARGEST = 1e18  # of a reward times its weight, because advantages square it
_PLAIN = {str, int, float, bool, type(None)}


@attrs.frozen(eq=False)
class Scores:
    """The rewards' results."""

    values_kb: np.ndarray  # float64 [K, B]: reward × completion, before weights; NaN = no reward
    problems: list[str]  # one line for each fault, in the order of the rewards
    failed: dict[int, str]  # rewards that failed at every completion: index -> the first fault
    extras: dict[str, list[Any]] = attrs.field(factory=dict)  # columns that rewards logged, B entries each
    metrics: dict[str, list[float]] = attrs.field(factory=dict)  # numbers that rewards logged


@attrs.define(eq=False)
class Scorer:
    """The rewards of a run and their time limit: seconds a call; 0 = none, called in the caller's thread.

    `on_error` says what a problem does: "skip" reports it in `Scores.problems` and goes on without that
    reward, "raise" makes it a RewardError. Only `_hanging` changes: the threads of calls that never returned.
    """

    rewards: Sequence[Reward]
    timeout: float = 60.0
    on_error: Literal["skip", "raise"] = "skip"
    _hanging: dict[int, list[Thread]] = attrs.field(factory=dict, init=False)

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
        check_columns(self.rewards, columns)
        if environments is not None:
            given["environments"] = environments
        completions = _wrap(texts) if conversations is None else conversations

        log = RewardLog(len(texts))
        same = {"trainer_state": trainer_state, "log_extra": log.log_extra, "log_metric": log.log_metric}
        calls = [
            _Called(reward, _arguments(reward, completions, given) | reward.pick(same), len(texts))
            for reward in self.rewards
        ]
        for each in calls:
            if each.reward.grouped:
                each.arguments["group_size"] = group_size
        outcomes = self._call_all(calls)
        values_kb = np.full((len(calls), len(texts)), np.nan)
        problems: list[str] = []
        failed: dict[int, str] = {}
        for k, (each, outcome) in enumerate(zip(calls, outcomes, strict=True)):
            notes, failures = self._judge(outcome, each, texts, values_kb[k])
            if notes and self.on_error == "raise":
                raise RewardError(notes[0]) from (outcome and outcome.error)
            if notes and failures == len(texts):
                failed[k] = notes[0]
            problems.extend(notes)
        for reward in self.rewards:  # of judges: faults besides their verdicts
            problems += getattr(reward.function, "take_notices", list)()
        problems += log.problems()
        # Copies, because a late call may still write into the log.
        metrics = {name: list(values) for name, values in log.metrics.items()}
        return Scores(values_kb, problems, failed, dict(log.extras), metrics)

    def _call_all(self, calls: Sequence["_Called"]) -> list[Outcome | None]:
        """The outcome of each call; None if too many earlier calls of that reward still hang."""
        outcomes: dict[int, Outcome] = {}
        ready = [k for k in range(len(calls)) if self._is_free(k)]
        together = [k for k in ready if is_async(calls[k].reward.function)]
        for limit in dict.fromkeys(self._limit(calls[k].reward) for k in together):
            some = [k for k in together if self._limit(calls[k].reward) == limit]
            pairs = [(calls[k].reward.function, calls[k].arguments) for k in some]
            found = call_together(pairs, limit, [calls[k].read for k in some])
            outcomes.update(zip(some, found, strict=True))
        for k in ready:
            if k not in outcomes:
                each = calls[k]
                limit = self._limit(each.reward)
                outcomes[k] = call(each.reward.function, each.arguments, limit, each.read)
        for k, outcome in outcomes.items():
            if outcome.thread is not None:
                self._hanging.setdefault(k, []).append(outcome.thread)
        return [outcomes.get(k) for k in range(len(calls))]

    def _limit(self, reward: Reward) -> float:
        return self.timeout if reward.timeout is None else reward.timeout

    def _is_free(self, k: int) -> bool:
        self._hanging[k] = [thread for thread in self._hanging.get(k, []) if thread.is_alive()]
        return len(self._hanging[k]) < _MAX_HANGING

    def _judge(
        self, outcome: Outcome | None, each: "_Called", texts: Sequence[str], row_b: np.ndarray
    ) -> tuple[list[str], int]:
        """Fill one reward's row with the usable values; lines on the others, and for how many completions."""
        prefix = f"reward {show(each.reward.name)}"
        every = len(texts)
        if outcome is None:
            return [f"{prefix} was not called: {_MAX_HANGING} earlier calls have not come back"], every
        if outcome.timed_out:
            return [f"{prefix} timed out after {self._limit(each.reward):g} s"], every
        if outcome.error is not None:
            index = _culprit(outcome.error, each.completions)
            where = "" if index is None else f" at completion {index}, {show(texts[index])}"
            return [f"{prefix} failed{where}: {outcome.message}"], every
        values, faults, failures = outcome.value
        row_b[: len(values)] = values
        return [f"{prefix} {fault}" for fault in faults], failures


@attrs.frozen(eq=False)
class _Called:
    """A reward and the arguments of its call; `completions` are the same objects."""

    reward: Reward
    arguments: dict[str, Any]
    size: int  # completions

    @property
    def completions(self) -> list[list[dict[str, Any]]]:
        return self.arguments.get("completions", [])

    def read(self, result: Any) -> tuple[list[float], list[str], int]:
        """The usable values of the function's result (NaN: no reward), lines on the others, and for how many
        completions there is no usable value.

        Only plain numbers and texts are returned, because reading the result may run the reward's own code.
        """
        values, fault = _as_list(python_value(result), self.size)
        if fault:
            return [], [fault], self.size
        faults: dict[str, list[int]] = {}
        numbers_b = []
        for index, value in enumerate(values):
            number, fault = _as_float(value, self.reward.weight)
            numbers_b.append(number)
            if fault:
                faults.setdefault(fault, []).append(index)
        lines = [
            f"{fault}, at completion {first}"
            + (f" ({found})" if (found := _found(values[first])) else "")
            + (f" and {len(others)} more" if others else "")
            for fault, (first, *others) in faults.items()
        ]
        return numbers_b, lines, sum(map(len, faults.values()))


def _arguments(
    reward: Reward, completions: Sequence[Any], given: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """The arguments of a reward from completions and columns, as separate lists."""
    picked = reward.pick({"completions": completions, **given})
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


def _found(value: Any) -> str:
    """The quotation of a value that is not a reward."""
    return value.found if isinstance(value, Failure) else show(value)


def _as_list(value: Any, wanted: int) -> tuple[list[Any], str]:
    """A reward's result as a list of `wanted` entries, or its fault."""
    if not isinstance(value, list):
        return [], f"returned {type(value).__name__}; wanted a list of {wanted} numbers or None"
    if len(value) != wanted:
        return [], f"returned {len(value)} values for {wanted} completions"
    return value, ""


def _as_float(value: Any, weight: float = 1.0) -> tuple[float, str]:
    """One entry of a reward's result as a float (NaN: none), and its fault, if any."""
    if value is None:
        return np.nan, ""
    if isinstance(value, Failure):
        return np.nan, value.reason
    if not isinstance(value, numbers.Real | Decimal):
        return np.nan, f"returned {type(value).__name__}, wanted a number or None"
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an integer too large for floats; a signalling NaN of Decimal
        number = np.nan
    except (Exception, SystemExit) as error:  # raised by the reward's own class
        kind = type(value).__name__
        return np.nan, f"returned a {kind} that is no float, as it raises {type(error).__name__}"
    if not np.isfinite(number):
        return np.nan, "returned a number that is not finite"
    if abs(number) * max(abs(weight), 1.0) > _LARGEST:
        return np.nan, f"returned a number beyond {_LARGEST:g}, whose square float32 cannot hold"
    return number, ""


def _culprit(error: BaseException, completions: list[list[dict[str, Any]]]) -> int | None:
    """The completion that a reward was processing when it failed; None if that is unknown.

    Each frame of the traceback, innermost first, is searched for a local variable that *is* one completion,
    its message or its text. The objects belong to this one call, so identity is proof enough.
    """
    if len(completions) == 1:
        return 0
    owners: dict[int, set[int]] = {}
    for index, completion in enumerate(completions):
        for part in (completion, *completion, *(message.get("content") for message in completion)):
            owners.setdefault(id(part), set()).add(index)
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    for frame in reversed(frames):
        held = [owners[id(value)] for value in frame.f_locals.values() if id(value) in owners]
        # Two completions may share one text object; such a local does not identify either.
        indices = set().union(*(owner for owner in held if len(owner) == 1))
        if len(indices) == 1:
            return indices.pop()
    return None
