"""Creates, resets and calls environments and tools in the user code's process.

The functions are operations of `runners.user_code` and address environments by number. Results are
plain values: texts, names and schemas.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.config.user_functions import public_functions, resolve_function
from runners.errors import UserError, error_line, show, text_of
from runners.rewards.calls import GET_REWARD, GET_TURN_REWARDS, TURN_REWARDS

_NOT_TOOLS = ("reset", GET_REWARD, GET_TURN_REWARDS)
_LONGEST_ERROR = 400  # limit on the characters of an error that the model sees

Store = dict[Any, Any]
Functions = dict[str, Callable[..., Any]]
Result = tuple[str, str, bool]  # tool name, text, whether the call failed


def load(store: Store, factory: str, tools: Sequence[str], folders: Sequence[str]) -> None:
    """Imports the class and the functions that [env] names. Raises UserError if one cannot be
    found, or if two functions have the same name.
    """
    dirs = tuple(map(Path, folders))
    store.setdefault("environments", {})
    store |= {"tools": {}, "factory": None}
    for text in tools:
        if text.endswith(".py"):
            functions = public_functions(text, dirs, key="env.tools")
        else:
            function = resolve_function(text, dirs, key="env.tools")
            functions = {getattr(function, "__name__", text.rpartition(":")[2]): function}
        for name in functions.keys() & store["tools"].keys():
            raise UserError(
                f"env.tools {show(text)}: there is already a tool {name}; rename one of them"
            )
        store["tools"] |= functions
    if factory:
        store["factory"] = resolve_function(
            factory, dirs, key="env.factory", takes=(), classes=True
        )
    store["reward", GET_REWARD] = get_rewards
    store["reward", GET_TURN_REWARDS] = get_turn_rewards
    # The first schema imports transformers and, if installed, PyTorch. This import must not count
    # against env.timeout, which limits only the user's code.
    _schema(_example, "_example", "env.tools")


def _example(text: str) -> None:
    """A function with a schema.

    Args:
        text: any
    """


def describe(store: Store, number: int, key: str) -> dict[str, Any]:
    """Returns the tools that [env] provides (name, schema, whether it is a coroutine function), and
    the reward methods of its class, each with its reward's name.

    Raises UserError for objects that are not environments, and for tools without a usable schema.
    """
    methods: Functions = {}
    rewards: dict[str, str] = {}
    if store["factory"] is not None:
        try:
            environment = _made(store, number)
        except (Exception, SystemExit) as error:
            raise UserError(f"{key} cannot be created: {error_line(error)}") from error
        name = type(environment).__name__
        if not callable(getattr(type(environment), "reset", None)):
            raise UserError(
                f"{key}: {name} has no method reset(self, **row); expected a class with this "
                f"method, whose public methods are the tools"
            )
        methods = _methods(environment)
        twice = sorted(methods.keys() & store["tools"].keys())
        if twice:
            raise UserError(
                f"{key} has a method {twice[0]}, and env.tools contains a function with the same name"
            )
        named = {GET_REWARD: name, GET_TURN_REWARDS: f"{name}_turns"}
        rewards = {
            method: reward
            for method, reward in named.items()
            if callable(getattr(environment, method, None))
        }
    tools = [
        (
            name,
            _schema(function, name, key if name in methods else "env.tools"),
            inspect.iscoroutinefunction(function),
        )
        for name, function in {**store["tools"], **methods}.items()
    ]
    return {"tools": tools, "rewards": rewards}


def check_columns(store: Store, number: int, columns: Sequence[str], key: str) -> None:
    """Raises UserError if the environment's `reset` does not accept these columns as keyword
    arguments.
    """
    signature = inspect.signature(_made(store, number).reset)
    try:
        signature.bind(**dict.fromkeys(columns))
    except TypeError as error:
        raise UserError(
            f"{key}: its signature is reset{signature}, but it is called with the data's columns "
            f"{', '.join(columns)}: {error}; expected reset(self, **row), or these names"
        ) from error


def get_rewards(environments: Sequence[Any]) -> Any:
    """Calls each environment's `get_reward`, and returns the results; None for an environment that
    has no such method. The returned value is awaitable if one of the results is.
    """
    methods = [getattr(environment, GET_REWARD, None) for environment in environments]
    found = [method() if callable(method) else None for method in methods]

    async def wait() -> list[Any]:
        return [await each if inspect.isawaitable(each) else each for each in found]

    return wait() if any(map(inspect.isawaitable, found)) else found


def get_turn_rewards(
    environments: Sequence[Any], log_extra: Callable[..., None]
) -> list[float | None]:
    """Calls each environment's `get_turn_rewards`, which returns a number or None for each turn,
    and returns the sums. The lists are logged as a column.
    """
    methods = [getattr(environment, GET_TURN_REWARDS, None) for environment in environments]
    found = [method if method is None else method() for method in methods]
    for method, values in zip(methods, found, strict=True):
        if method is not None and not isinstance(values, list | tuple):
            raise TypeError(
                f"{GET_TURN_REWARDS}: expected a list of numbers, found {type(values).__name__}"
            )
    rows = [None if row is None else list(map(_as_number, row)) for row in found]
    log_extra(TURN_REWARDS, rows)
    return [None if row is None else sum(filter(None, row)) for row in rows]


def _as_number(value: Any) -> float | None:
    return None if value is None else float(value)


def reset(store: Store, number: int, columns: Mapping[str, Any]) -> Any:
    """Resets environment `number` for a new episode, and returns the text from `reset`. A missing
    environment is created first. The returned value is awaitable if the result of `reset` is.
    """
    found = _made(store, number).reset(**columns)

    async def wait() -> str:
        return _text(await found, none="")

    return wait() if inspect.isawaitable(found) else _text(found, none="")


def call(
    store: Store, number: int | None, calls: Sequence[tuple[str, Any]], characters: int
) -> list[Result] | Any:
    """Executes a turn's calls in order, and returns their results. The returned value is awaitable
    if one of the tools is a coroutine function. Result texts are truncated to `characters`.

    Each call consists of a name and either its arguments or the reason why it cannot be executed.
    """
    functions = dict(store["tools"])
    if number in store["environments"]:
        functions |= _methods(store["environments"][number])

    async def made(name: str, arguments: Any) -> Result:
        if isinstance(arguments, str):
            return failure(name or "tool", arguments)
        if name not in functions:
            return failure(name, "the environment is lost, because its process ended")
        try:
            found = functions[name](**arguments)
            text = _text(await found if inspect.iscoroutinefunction(functions[name]) else found)
            # An unpaired surrogate, which tokenizers cannot process, becomes a question mark.
            return name, text[:characters].encode("utf-8", "replace").decode(), False
        except (Exception, SystemExit) as error:
            return failure(name, (text_of(error) or type(error).__name__)[:_LONGEST_ERROR])

    async def all_made() -> list[Result]:
        return [await made(name, arguments) for name, arguments in calls]

    results = all_made()
    if any(inspect.iscoroutinefunction(functions.get(name)) for name, _ in calls):
        return results
    # Nothing here is awaited. The coroutine runs to its end outside any event loop, so a tool may
    # start its own loop.
    try:
        results.send(None)
    except StopIteration as end:
        return end.value


def drop(store: Store, numbers: Sequence[int]) -> None:
    """Deletes environments."""
    for number in numbers:
        store["environments"].pop(number, None)


def failure(name: str, fault: str) -> Result:
    """Returns the result for a failed call."""
    return name, str({"error": fault}), True


def _made(store: Store, number: int) -> Any:
    if number not in store["environments"]:
        store["environments"][number] = store["factory"]()
    return store["environments"][number]


def _methods(environment: Any) -> Functions:
    """Returns an environment's tools: its public methods, bound, by name. The methods are looked up
    in the class, so the instance's properties are not evaluated.
    """
    return {
        name: getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if not name.startswith("_") and name not in _NOT_TOOLS
    }


def _schema(function: Callable[..., Any], name: str, key: str) -> dict[str, Any]:
    """Returns the schema of a function or bound method, based on its type hints and docstring.
    Raises UserError if they are insufficient.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise UserError(
            f"{key}: the tool {name} cannot be described to a model: {error_line(error)}; expected "
            "type hints for all arguments and a docstring with an Args section"
        ) from error


def _text(value: Any, none: str = "None") -> str:
    """Converts a result from a tool or `reset` to text. The texts in a list of text blocks are
    joined.
    """
    if isinstance(value, list) and all(
        isinstance(x, Mapping) and x.get("type") == "text" for x in value
    ):
        return "".join(str(block.get("text", "")) for block in value)
    return none if value is None else str(value)
