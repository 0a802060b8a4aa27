"""Environments and tools where they run, in the process of user code: made, reset and called by number.

These are operations of `runners.user_code`. What comes back is plain: texts, names and schemas.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.config.user_functions import resolve_function
from runners.environments.tools import (
    check_environment,
    check_reset,
    resolve_tools,
    tool_methods,
    tool_schema,
)
from runners.errors import UserError, error_line
from runners.rewards.calls import GET_REWARD

_LONGEST_ERROR = 400  # characters of an error that a model is shown

Store = dict[Any, Any]
Result = tuple[str, str, bool, bool]  # of a call: the tool, its text, whether it failed, whether it is cut


def load(store: Store, factory: str, tools: Sequence[str], folders: Sequence[str]) -> None:
    """Imports the class and the functions of [env]. Raises UserError if one cannot be found."""
    dirs = [Path(folder) for folder in folders]
    store["tools"], store["factory"] = resolve_tools(tools, dirs), None
    if factory:
        store["factory"] = resolve_function(factory, dirs, key="env.factory", takes=(), classes=True)
    store["reward", GET_REWARD] = get_rewards


def prepare(store: Store) -> None:
    """Imports what `describe` takes long to import."""
    importlib.import_module("transformers.utils.chat_template_utils")


def describe(store: Store, number: int, key: str) -> dict[str, Any]:
    """The tools of [env], and the name of the class if it has a reward.

    With a factory an environment is made. Raises UserError for tools that cannot be described to a model, and
    for what is no environment.
    """
    methods: dict[str, Callable[..., Any]] = {}
    reward = None
    if store["factory"] is not None:
        try:
            environment = _made(store, number)
        except (Exception, SystemExit) as error:
            raise UserError(f"{key} cannot be made: {error_line(error)}") from error
        check_environment(environment, key)
        methods = tool_methods(environment)
        twice = sorted(methods.keys() & store["tools"].keys())
        if twice:
            raise UserError(f"{key} has a method {twice[0]}, and env.tools a function of that name")
        if callable(getattr(environment, GET_REWARD, None)):
            reward = type(environment).__name__
    tools = [
        (name, tool_schema(function, name, of), inspect.iscoroutinefunction(function))
        for of, functions in (("env.tools", store["tools"]), (key, methods))
        for name, function in functions.items()
    ]
    return {"tools": tools, "reward": reward}


def check_columns(store: Store, number: int, columns: Sequence[str], key: str) -> None:
    """Raises UserError if the environment's `reset` does not take these columns."""
    check_reset(_made(store, number), columns, key)


def get_rewards(environments: Sequence[Any]) -> Any:
    """What each environment's `get_reward` returns; None for one without. Awaitable if one is a coroutine."""
    methods = [getattr(environment, GET_REWARD, None) for environment in environments]
    found = [method() if callable(method) else None for method in methods]

    async def wait() -> list[Any]:
        return [await each if inspect.isawaitable(each) else each for each in found]

    return wait() if any(map(inspect.isawaitable, found)) else found


def reset(store: Store, number: int, columns: Mapping[str, Any]) -> Any:
    """Begins an episode in environment `number`, which is made if it is missing; what it says, as a text."""
    found = _made(store, number).reset(**columns)

    async def text() -> str:
        return _observation_text(await found)

    return text() if inspect.isawaitable(found) else _observation_text(found)


def call(
    store: Store, number: int | None, calls: Sequence[tuple[str, Any]], characters: int
) -> list[Result] | Any:
    """A turn's calls, one after another; awaitable if one is a coroutine's. A text has `characters` at most.

    Each is a name and its arguments, or a name and, as a text, why it cannot be made.
    """
    functions = [_function(store, number, name) for name, _ in calls]

    async def together() -> list[Result]:
        found = []
        for function, (name, arguments) in zip(functions, calls, strict=True):
            if not inspect.iscoroutinefunction(function) or isinstance(arguments, str):
                found.append(_done(function, (name, arguments), characters))
                continue
            try:
                found.append(_shown(name, await function(**arguments), characters))
            except (Exception, SystemExit) as error:
                found.append(failure(name, _error_text(error)))
        return found

    if any(map(inspect.iscoroutinefunction, functions)):
        return together()
    return [_done(*each, characters) for each in zip(functions, calls, strict=True)]


def drop(store: Store, numbers: Sequence[int]) -> None:
    """Forgets environments."""
    for number in numbers:
        store.get("environments", {}).pop(number, None)


def failure(name: str, fault: str) -> Result:
    """The result of a call that failed."""
    return name, str({"error": fault}), True, False


def _made(store: Store, number: int) -> Any:
    known = store.setdefault("environments", {})
    if number not in known:
        known[number] = store["factory"]()
    return known[number]


def _function(store: Store, number: int | None, name: str) -> Callable[..., Any] | None:
    environment = store.get("environments", {}).get(number)
    methods = {} if environment is None else tool_methods(environment)
    return {**store["tools"], **methods}.get(name)


def _done(function: Callable[..., Any] | None, each: tuple[str, Any], characters: int) -> Result:
    name, arguments = each
    if isinstance(arguments, str):
        return failure(name or "tool", arguments)
    if function is None:
        return failure(name, "the environment is gone: its process was ended")
    try:
        return _shown(name, function(**arguments), characters)
    except (Exception, SystemExit) as error:
        return failure(name, _error_text(error))


def _shown(name: str, value: Any, characters: int) -> Result:
    if isinstance(value, list) and all(isinstance(x, Mapping) and x.get("type") == "text" for x in value):
        value = "".join(str(block.get("text", "")) for block in value)
    text = str(value)
    # Half of a surrogate pair, which no tokenizer can read, becomes a question mark.
    text = text[: characters + 1].encode("utf-8", "replace").decode()
    return name, text, False, len(text) > characters


def _observation_text(observation: Any) -> str:
    """What `reset` returned, as the text that is appended to the prompt."""
    if isinstance(observation, list):
        return "".join(str(x.get("text", "")) for x in observation if isinstance(x, Mapping))
    return "" if observation is None else str(observation)


def _error_text(error: BaseException) -> str:
    try:
        return (str(error) or type(error).__name__)[:_LONGEST_ERROR]
    except Exception:  # raised by the tool's own exception class
        return type(error).__name__
