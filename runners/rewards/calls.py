"""Calls a reward in the process that loaded its function: passes the arguments, and reads the
result and the errors.

`load` and `score` are operations of the user-code process (`runners.user_code`). Results are plain
values. `trainer_state`, `log_extra` and `log_metric` are the same as in TRL's GRPOTrainer, so
functions written for it run unchanged.
"""

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import attrs

from runners.answers.values import value_text
from runners.config.user_functions import function_file, resolve_function
from runners.errors import Failure, error_line, show
from runners.metrics import ENDED_PROGRAMS, METRICS
from runners.user_code.process import finished, is_async

GET_REWARD = "get_reward"  # name of the environments' reward
GET_TURN_REWARDS = "get_turn_rewards"  # name of the environments' turn rewards
TURN_REWARDS = "turn_rewards"  # the column in which turn rewards are logged
_LARGEST = 1e15  # limit of a reward, because advantages square it and weights multiply it

# keys: values, faults, failures, ended; extras and metrics of the log
Result = dict[str, Any]
Store = dict[Any, Any]


@attrs.frozen
class TrainerState:
    """The progress of a run, in those fields of transformers' TrainerState that apply here."""

    global_step: int = 0  # optimizer updates taken
    max_steps: int = 0  # optimizer updates of the whole run
    epoch: float = 0.0  # epochs done, with fractions
    num_train_epochs: int = 0


NO_RUN = TrainerState()
"""The state that rewards receive outside a run."""


@attrs.frozen(eq=False)
class RewardLog:
    """The texts and numbers that rewards logged during one call of the scorer."""

    size: int  # completions
    extras: dict[str, list[Any]] = attrs.field(factory=dict)  # column -> one entry per completion
    # name -> each value that was logged
    metrics: dict[str, list[float]] = attrs.field(factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Logs a column for completions.jsonl. Raises ValueError unless the column has one entry
        per completion.
        """
        if len(values) != self.size:
            raise ValueError(
                f"log_extra({column!r}, …) received {len(values)} values for {self.size} "
                f"completions"
            )
        self.extras[column] = [_plain(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number for training_log.jsonl, which contains the mean over an update's values.
        Raises ValueError for a reserved name.
        """
        if name in METRICS and name != ENDED_PROGRAMS:
            raise ValueError(f"log_metric: the name {name} is reserved; choose another one")
        self.metrics.setdefault(name, []).append(float(value))

    def add(self, found: Mapping[str, Any]) -> None:
        """Adds the values that one reward call logged."""
        self.extras.update(found["extras"])
        for name, values in found["metrics"].items():
            self.metrics.setdefault(name, []).extend(values)


def _plain(value: Any) -> Any:
    """Converts a value to a JSON type. Entries of a list or an array (such as turn rewards) are
    converted one by one.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return (
        value if value is None or isinstance(value, bool | int | float | str) else value_text(value)
    )


@attrs.frozen
class Parameters:
    """The arguments that a reward's function accepts by name."""

    names: tuple[str, ...]
    needed: tuple[str, ...]  # names without a default
    takes_all: bool = False  # whether it has ``**kwargs``

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """Returns the arguments that a function in this process accepts."""
        every = inspect.signature(function).parameters.values()
        named = [
            each for each in every if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        return cls(
            tuple(each.name for each in named),
            tuple(each.name for each in named if each.default is each.empty),
            any(each.kind is each.VAR_KEYWORD for each in every),
        )

    def pick(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the available arguments that the function accepts."""
        return {
            name: each for name, each in available.items() if self.takes_all or name in self.names
        }


def load(store: Store, name: str, folders: Sequence[str]) -> dict[str, Any]:
    """Imports a reward's function for `score`, and describes it. Raises UserError like
    `ready_function`.
    """
    function = store["reward", name] = ready_function(name, folders)
    file = function_file(name, folders)
    return {
        "parameters": attrs.astuple(Parameters.of(function)),
        "is_async": is_async(function),
        "file": None if file is None else str(file),
    }


def ready_function(name: str, folders: Sequence[str | Path]) -> Callable[..., Any]:
    """Returns the function of a reward that is not built in. Raises the errors of
    `resolve_function` and, if the function has a `check_ready`, those of `check_ready`.
    """
    function = resolve_function(name, folders, key="reward")
    getattr(function, "check_ready", lambda: None)()
    return function


def score(
    store: Store,
    name: str,
    arguments: dict[str, Any],
    size: int,
    environments: Sequence[int | None] | None,
) -> Any:
    """Calls `run` for a loaded reward; the result is awaitable if the reward's function is async.
    `environments` are given by number.
    """
    function = store["reward", name]
    if environments is not None:
        known = store.get("environments", {})
        if {*environments} - {None, *known}:
            return nothing(
                size,
                "failed: the environments are lost, because their process ended",
                ended=True,
            )
        arguments["environments"] = [known.get(number) for number in environments]
    return (run_async if is_async(function) else run)(function, arguments, size)


def run(function: Callable[..., Any], arguments: dict[str, Any], size: int) -> Result:
    """Calls a reward on `size` completions, and passes the log functions that the reward
    accepts.
    """
    log = RewardLog(size)
    try:
        return _read(finished(function(**arguments, **_ways(function, log))), log)
    except (Exception, SystemExit) as error:
        return _failed(error, function, size)


async def run_async(function: Callable[..., Any], arguments: dict[str, Any], size: int) -> Result:
    """Awaits an async reward on `size` completions, and passes the log functions that the reward
    accepts.
    """
    log = RewardLog(size)
    try:
        return _read(await function(**arguments, **_ways(function, log)), log)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return _failed(error, function, size)


def nothing(size: int, fault: str, *, ended: bool = False) -> Result:
    """Returns the result for a call in which no completion has a reward."""
    return {
        "values": [],
        "faults": [fault],
        "failures": size,
        "ended": ended,
        "extras": {},
        "metrics": {},
    }


def _ways(function: Callable[..., Any], log: RewardLog) -> dict[str, Callable[..., None]]:
    return Parameters.of(function).pick({"log_extra": log.log_extra, "log_metric": log.log_metric})


def _read(result: Any, log: RewardLog) -> Result:
    """Returns the usable values from a reward's result (NaN means no reward), messages about the
    other values, and the number of completions without a reward.
    """
    # Arrays are read here because only this thread can evaluate MLX's lazy arrays.
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple):
        return nothing(
            log.size,
            f"returned {type(values).__name__}; expected a list of {log.size} numbers or None",
        )
    if len(values) != log.size:
        return nothing(log.size, f"returned {len(values)} values for {log.size} completions")
    read = [_as_float(value) for value in values]
    faults = dict[str, list[int]]()
    for index, (_, fault) in enumerate(read):
        if fault:
            faults.setdefault(fault, []).append(index)
    lines = []
    for fault, (first, *others) in faults.items():
        quoted = values[first].found if isinstance(values[first], Failure) else show(values[first])
        more = f" and {len(others)} more" if others else ""
        lines.append(f"{fault}, at completion {first}" + (f" ({quoted})" if quoted else "") + more)
    return {
        "values": [number for number, _ in read],
        "faults": lines,
        "failures": sum(map(len, faults.values())),
        "ended": False,
        "extras": log.extras,
        "metrics": log.metrics,
    }


def _failed(error: BaseException, function: Callable[..., Any], size: int) -> Result:
    """Returns the result for a failed call: the error, and the last line in its traceback that is
    in the reward's own file.
    """
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    line = error_line(error, file)
    line = f"{Path(str(file)).name}, {line}" if line.startswith("line ") else line
    return nothing(size, f"failed: {line}", ended=isinstance(error, SystemExit))


def _as_float(value: Any) -> tuple[float, str]:
    """Returns one entry of a reward's result as a float (NaN means no reward), and a message if the
    entry is invalid.
    """
    if value is None:
        return math.nan, ""
    if isinstance(value, Failure):
        return math.nan, value.reason
    value = value.item() if getattr(value, "size", 0) == 1 else value
    if not isinstance(value, numbers.Real | Decimal):
        return math.nan, f"returned {type(value).__name__}, expected a number or None"
    try:
        number = float(value)
    except Exception:  # an integer too large for floats, or a custom class
        number = math.nan
    if not math.isfinite(number):
        return math.nan, "returned a number that is not finite"
    if abs(number) > _LARGEST:
        return math.nan, f"returned a number beyond {_LARGEST:g}, whose square exceeds float32"
    return number, ""
