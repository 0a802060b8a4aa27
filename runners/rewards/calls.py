"""Calling other people's functions: in a thread with a time limit, errors as values, async ones together."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from runners.errors import error_line

# Past its time limit, a loop of async calls gets this long (seconds) to cancel them and close.
_CLOSING_TIME = 0.5

Call = tuple[Callable[..., Any], Mapping[str, Any]]


@attrs.frozen(eq=False)
class Outcome:
    """What a call came to: a value, or an error, or neither because it ran past its time."""

    value: Any = None  # arrays and their scalars turned into lists and numbers
    error: BaseException | None = None
    message: str = ""  # the error in a line; an exception's text is somebody else's code, too
    timed_out: bool = False
    thread: threading.Thread | None = None  # of a call past its time, which nothing can stop from outside


def plain_value(value: Any) -> Any:
    """A result with arrays and their scalars as lists and numbers."""
    # In the thread of the call: a lazy MLX array can be evaluated nowhere else.
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
    read: Callable[[Any], Any] = plain_value,
) -> Outcome:
    """Call a function with keywords; past `timeout` seconds it is left running in a daemon thread.

    The outcome's value is what `read` makes of the result, in the same thread and time: whatever an object
    does when it is looked at, it does there.

    With timeout 0 it is called in this thread, without a limit: some code (signal handlers, MLX graphs that
    the main thread has not evaluated) works nowhere else. An awaitable result is awaited.
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
    """Await async functions concurrently in one event loop; past `timeout` seconds the late are cancelled.

    The loop runs in a thread of its own, so that a loop of the caller's (a notebook's) is not in the way, and
    a function that blocks the loop is left behind with it. Timeout 0 is no limit. `read`: as in `call`, one
    for each.
    """
    outcomes: dict[int, Outcome] = {}

    async def run_one(index: int, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        try:
            result = await function(**arguments)
            outcomes[index] = Outcome(value=(read[index] if read else plain_value)(result))
        except BaseException as error:  # one that is no Exception would end the loop, and the other calls
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
        # In the caller's thread a KeyboardInterrupt is a person's; in a reward's nothing passes unseen.
        if not everything:
            raise
        return _failed(error)


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="grpo-reward", daemon=True)
    thread.start()
    return thread
