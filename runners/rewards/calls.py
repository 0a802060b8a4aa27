"""Calls user functions: in a thread with a time limit, errors as values, async ones together."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from runners.errors import error_line

# Seconds that a loop of async calls gets after its time limit to cancel them and close.
_CLOSING_TIME = 0.5

Call = tuple[Callable[..., Any], Mapping[str, Any]]


@attrs.frozen(eq=False)
class Outcome:
    """The outcome of a call: a value, an error, or neither because it exceeded its time."""

    value: Any = None  # arrays and their scalars turned into lists and numbers
    error: BaseException | None = None
    message: str = ""  # the error in a line; making an exception's text is foreign code, too
    timed_out: bool = False
    thread: threading.Thread | None = (
        None  # of a call that exceeded its time; nothing can stop it from outside
    )


def python_value(value: Any) -> Any:
    """A result with arrays and their scalars as lists and numbers."""
    # In the thread of the call, because a lazy MLX array can be evaluated only there.
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [
            each.item() if getattr(each, "size", 0) == 1 and hasattr(each, "item") else each for each in value
        ]
    return value


def call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    timeout: float,
    read: Callable[[Any], Any] = python_value,
) -> Outcome:
    """Call a function with keywords; after `timeout` seconds it is left running in a daemon thread.

    The outcome's value is `read(result)`, computed in the same thread and within the same time, because
    reading a result may run foreign code.

    With timeout 0 it is called in this thread, without a limit: some code (signal handlers, MLX graphs that
    the main thread has not evaluated) works only there. An awaitable result is awaited.
    """

    def act() -> Any:
        result = function(**arguments)
        return read(asyncio.run(_wait(result)) if inspect.isawaitable(result) else result)

    if not timeout:
        return _attempt(act)
    outcomes: list[Outcome] = []
    thread = _start(lambda: outcomes.append(_attempt(act, everything=True)))
    thread.join(timeout)
    if outcomes:
        return outcomes[0]
    return Outcome(timed_out=True, thread=thread) if thread.is_alive() else _DIED


def call_together(
    calls: Sequence[Call], timeout: float, read: Sequence[Callable[[Any], Any]] | None = None
) -> list[Outcome]:
    """Await async functions concurrently in one event loop; after `timeout` seconds late ones are cancelled.

    The loop runs in a separate thread, so that it does not conflict with the caller's loop (in a notebook),
    and a function that blocks the loop can be left behind with it. Timeout 0 means no limit. `read`: as in
    `call`, one for each function.
    """
    outcomes: dict[int, Outcome] = {}

    async def run_one(index: int, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        try:
            result = await function(**arguments)
            outcomes[index] = Outcome(value=(read[index] if read else python_value)(result))
        except (
            BaseException
        ) as error:  # an error that is not an Exception would end the loop and the other calls
            outcomes.setdefault(index, _failed(error))

    async def run_all() -> None:
        tasks = {asyncio.create_task(run_one(i, *each)): i for i, each in enumerate(calls)}
        _, late = await asyncio.wait(tasks, timeout=timeout or None)
        for task in late:
            # asyncio.run cancels it on its way out; the thread ends unless the task refuses.
            outcomes[tasks[task]] = Outcome(timed_out=True, thread=threading.current_thread())

    ends: list[Outcome] = []
    thread = _start(lambda: ends.append(_attempt(lambda: asyncio.run(run_all()), everything=True)))
    thread.join(timeout + _CLOSING_TIME if timeout else None)
    missing = ends[0] if ends and ends[0].error else Outcome(timed_out=True, thread=thread)
    if not ends and not thread.is_alive():
        missing = _DIED
    return [outcomes.get(index, missing) for index in range(len(calls))]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine: an ``async def``, or an object with one."""
    method = getattr(type(function), "__call__", None)  # noqa: B004 (its kind is asked, not whether it exists)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


_DIED = Outcome(error=RuntimeError("it ended its thread"), message="it ended the thread that it ran in")


def _failed(error: BaseException) -> Outcome:
    return Outcome(error=error, message=error_line(error))


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _attempt(action: Callable[[], Any], everything: bool = False) -> Outcome:
    try:
        return Outcome(value=action())
    except (Exception, SystemExit) as error:
        return _failed(error)
    except BaseException as error:
        # In the caller's thread a KeyboardInterrupt comes from the user; in a reward's thread it is an error.
        if not everything:
            raise
        return _failed(error)


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="grpo-reward", daemon=True)
    thread.start()
    return thread
