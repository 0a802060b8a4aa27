"""Tools: functions and methods that a model may call, with their schemas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.config.user_functions import public_functions, resolve_function
from runners.errors import UserError, error_line, show

_NOT_TOOLS = ("reset", "get_reward")


@attrs.frozen(eq=False)
class Tool:
    """One tool: its name, its schema for chat templates, and whether it is a coroutine function."""

    name: str
    schema: dict[str, Any]
    is_async: bool


def tool_schema(function: Callable[..., Any], name: str, key: str) -> dict[str, Any]:
    """The schema of a function or bound method.

    Raises UserError if its type hints or docstring do not describe each argument.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise UserError(
            f"{key}: the tool {name} cannot be described to a model: {error_line(error)}; expected type "
            "hints for all arguments and a docstring with an Args section"
        ) from error


def resolve_tools(names: Sequence[str], folders: Iterable[Path] = ()) -> dict[str, Callable[..., Any]]:
    """The plain functions of env.tools, by name; for a file, all its public ones.

    Raises UserError as `resolve_function` does, and for two functions with the same name.
    """
    dirs = tuple(folders)
    found: dict[str, Callable[..., Any]] = {}
    for text in names:
        if text.endswith(".py"):
            functions = public_functions(text, dirs, key="env.tools")
        else:
            function = resolve_function(text, dirs, key="env.tools")
            functions = {getattr(function, "__name__", text.rpartition(":")[2]): function}
        for name, function in functions.items():
            if name in found:
                raise UserError(f"env.tools {show(text)}: there is a tool {name} already; rename one of them")
            found[name] = function
    return found


def tool_methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment that are tools, bound, by name.

    They are looked up in the class: properties of the instance are not evaluated.
    """
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return {
        name: getattr(environment, name)
        for name, _ in members
        if not name.startswith("_") and name not in _NOT_TOOLS
    }


def check_environment(environment: Any, key: str) -> None:
    """Raise UserError unless an instance is an environment: it has a `reset` method."""
    if not callable(getattr(type(environment), "reset", None)):
        raise UserError(
            f"{key}: {type(environment).__name__} has no method reset(self, **row); expected a class with "
            "one, and with public methods as its tools"
        )


def check_reset(environment: Any, columns: Iterable[str], key: str) -> None:
    """Raise UserError if `reset` does not take the data's columns, which it gets by name."""
    names = list(columns)
    try:
        signature = inspect.signature(environment.reset)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise UserError(
            f"{key}: its signature is reset{signature}, and it is called with the data's columns "
            f"{', '.join(names)}: {error}; expected reset(self, **row), or these names"
        ) from error
