"""How calls of user code run, and what comes of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import attrs

from runners.errors import UserError, error_line

# How a call runs. MAIN: one after another, in the main thread of the worker process. THREAD: each in its own.
# TOGETHER: coroutines, in one event loop.
MAIN, THREAD, TOGETHER = "main", "thread", "together"


@attrs.frozen(eq=False)
class Outcome:
    """What came of a call."""

    value: Any = None
    fault: str = ""  # one line; empty: it returned
    refused: bool = False  # the fault is a UserError's message
    ended: bool = False  # it was too slow, called sys.exit or ended its process, instead of raising an error
    timed_out: bool = False
    seconds: float = 0.0

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """The outcome of a call that raised."""
        if isinstance(error, UserError):
            return cls(fault=str(error), refused=True)
        return cls(fault=error_line(error), ended=isinstance(error, SystemExit))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine: an ``async def``, or an object with one."""
    method = getattr(type(function), "__call__", None)  # noqa: B004 (its kind is asked, not whether it exists)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def finished(value: Any) -> Any:
    """The value; one that can be awaited is awaited."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value
