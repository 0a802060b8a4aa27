"""From a reward's name in the config to the function that it means, checked before anything is loaded."""

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from grpo_fn.rewards import REWARDS
from runners.errors import UserError, did_you_mean, show

FORMS = "package.module:function or path/to/file.py:function"
PASSED = ("completions", "prompts", "completion_ids")
"""The names that every reward may take besides the dataset's columns."""

_TOLD = 300  # characters of an exception's message that fit into a one-line message
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@attrs.frozen(eq=False)
class Reward:
    """One reward: its name in logs, its function (plain or async, called with keywords only), its weight."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    def pick(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the available arguments that the function takes: all of them if it has ``**kwargs``."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return dict(available)
        taken = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
        return {name: value for name, value in available.items() if name in taken}

    @property
    def needs(self) -> tuple[str, ...]:
        """The parameters that the function cannot be called without."""
        return tuple(
            parameter.name
            for parameter in inspect.signature(self.function).parameters.values()
            if parameter.kind in _BY_NAME and parameter.default is parameter.empty
        )


def resolve_rewards(
    names: Sequence[str], weights: Sequence[float] = (), base_dirs: Iterable[str | Path] = ()
) -> tuple[Reward, ...]:
    """The rewards of a config, in its order; no weights mean 1.0 each.

    A reward's name in logs is its function's; where two functions share one, their full texts are used.
    Raises UserError for a reward that cannot be resolved or is named twice, and for weights that are not one
    finite number per reward.
    """
    if not names:
        raise UserError("reward.functions is empty; wanted one reward at least")
    if weights and len(weights) != len(names):
        raise UserError(
            f"reward.weights has {len(weights)} entries for {len(names)} functions; wanted one each or none"
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise UserError(f"reward.weights holds {weight}; wanted finite numbers")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"reward.functions names {show(name)} twice; wanted each once")
    dirs = tuple(base_dirs)
    rewards = [
        resolve_reward(name, dirs, weight)
        for name, weight in zip(names, weights or [1.0] * len(names), strict=True)
    ]
    short = [reward.name for reward in rewards]
    return tuple(
        attrs.evolve(reward, name=full) if short.count(reward.name) > 1 else reward
        for reward, full in zip(rewards, names, strict=True)
    )


def resolve_reward(name: str, base_dirs: Iterable[str | Path] = (), weight: float = 1.0) -> Reward:
    """The reward that a name means: a built-in one, ``package.module:function`` or ``a/file.py:function``.

    A relative file is looked for in each of `base_dirs` in turn (in the working directory where there are
    none). The folders of `base_dirs`, and a reward file's own folder, join the end of Python's path, so that
    a module there can be named and a file can import its neighbours; they stay, as an import may come late.

    Raises UserError, in one line, for an unknown name, a missing file or module, a failing import, a missing
    function (with the nearest spelling), something that cannot be called, a signature without `completions`.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name in REWARDS:
            return Reward(name, REWARDS[name], weight)
        raise UserError(
            f"reward {show(name)} is not a built-in one ({', '.join(REWARDS)}); one's own is written "
            f"{FORMS}{did_you_mean(name, REWARDS)}"
        )
    if not place or not attribute:
        raise UserError(f"reward {show(name)}: wanted {FORMS}")
    dirs = [Path(folder).expanduser().resolve() for folder in base_dirs] or [Path.cwd()]
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _load_file(name, place, dirs) if is_file else _load_module(name, place, dirs)
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"reward {show(name)}: {place} has no {attribute}{did_you_mean(attribute, known)}")
    function = getattr(module, attribute)
    _check_callable(name, attribute, function)
    return Reward(attribute, function, weight)


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Raise UserError if a reward needs a column that the data lacks, naming it and the nearest one."""
    found = sorted(set(columns))
    for reward in rewards:
        for needed in reward.needs:
            if needed not in found and needed not in PASSED:
                raise UserError(
                    f"reward {show(reward.name)} needs the column {needed}; the data has "
                    f"{', '.join(found) or 'none'}{did_you_mean(needed, found)}"
                )


def told(error: BaseException, path: Path | None = None) -> str:
    """An exception in one line of bounded length, led by its line in the file at `path` if it has one."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())[:_TOLD]}"


def _load_file(name: str, place: str, dirs: Sequence[Path]) -> ModuleType:
    candidates = [folder / Path(place).expanduser() for folder in dirs]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise UserError(f"reward {show(name)}: no file at {' or '.join(map(str, candidates))}")
    if path.suffix != ".py":
        raise UserError(f"reward {show(name)}: {path.name} is not a Python file; its name must end in .py")
    path = path.resolve()
    # The time stamp lets a notebook edit its rewards and resolve them anew.
    stamp = f"{path}:{path.stat().st_mtime_ns}".encode()
    module_name = f"grpo_reward_{hashlib.sha256(stamp).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward {show(name)}: Python cannot import {path}")
    _extend_path([path.parent])
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before execution: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(f"reward {show(name)}: importing {path} failed: {told(error, path)}") from error
    return module


def _load_module(name: str, place: str, dirs: Sequence[Path]) -> ModuleType:
    _extend_path(dirs)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise UserError(f"reward {show(name)}: importing {place} failed: {told(error)}") from error
        looked = ", ".join(map(str, dirs))
        raise UserError(
            f"reward {show(name)}: no module named {error.name} on Python's path or in {looked}; a file is "
            "written path/to/file.py:function"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"reward {show(name)}: importing {place} failed: {told(error)}") from error


def _extend_path(dirs: Iterable[Path]) -> None:
    # At the end: a reward's neighbour never hides an installed module.
    sys.path.extend(str(folder) for folder in dirs if str(folder) not in sys.path)


def _check_callable(name: str, attribute: str, function: object) -> None:
    if inspect.isclass(function):
        raise UserError(
            f"reward {show(name)}: {attribute} is a class; wanted a function or an instance to call"
        )
    if not callable(function):
        raise UserError(f"reward {show(name)}: {attribute} is {type(function).__name__}; wanted a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward {show(name)}: the parameters of {attribute} cannot be read; wrap it in a def"
        ) from error
    parameters = signature.parameters.values()
    by_name = [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = any(
        parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
        for parameter in parameters
    )
    if positional or not (any_name or "completions" in by_name):
        raise UserError(
            f"reward {show(name)}: the signature is {attribute}{signature}; arguments are passed by name, so "
            f"wanted {attribute}(completions, ...)"
        )
