"""Imports custom functions that a config names: package.module:function or
path/to/file.py:function.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from runners.answers.values import value_text
from runners.errors import UserError, did_you_mean, error_line, show, user_errors

FUNCTION_FORMS = "package.module:function or path/to/file.py:function"


def resolve_function(
    name: str,
    base_dirs: Iterable[str | Path] = (),
    *,
    key: str,
    takes: Sequence[str] | None = None,
    classes: bool = False,
) -> Callable[..., Any]:
    """Returns the function for a name in a config.

    A relative file is looked up in each of `base_dirs` in turn (without them, in the working
    directory). The folders of `base_dirs` and the file's own folder are appended to Python's path,
    so that their modules can be named and a file can import its neighbours. The folders are not
    removed, because later imports may need them.

    Args:
        name: as in the config.
        base_dirs: usually the working directory and the config's folder.
        key: the config key that messages name, such as "model.loader".
        takes: the names of the positional arguments that the function is called with; None means
            not checked.
        classes: whether a class is accepted too, which is called to create an instance.

    Raises UserError, in one line, for a missing file or module, a failing import, a missing
    function (with the nearest spelling), or an object that cannot be called with these arguments.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{key}: expected {FUNCTION_FORMS}, found {show(name)}")
    what = f"{key} {show(name)}"
    module = (_load_file if _is_file(place) else _load_module)(what, place, _folders(base_dirs))
    if not hasattr(module, attribute):
        known = [name for name, value in vars(module).items() if callable(value)]
        raise UserError(f"{what}: {place} has no {attribute}{did_you_mean(attribute, known)}")
    function = getattr(module, attribute)
    if not callable(function) or (inspect.isclass(function) and not classes):
        expected = "one class; its reset(**row) can choose by a column" if classes else "a function"
        is_class = inspect.isclass(function)
        found = f"the class {attribute}" if is_class else type(function).__name__
        raise UserError(f"{what}: expected {expected}, found {found}")
    with user_errors(
        f"{what}: expected {attribute}({', '.join(takes or ())})", TypeError, ValueError
    ):
        signature = inspect.signature(function)
        if takes is not None:
            signature.bind(*takes)
    return function


def public_functions(
    file: str, base_dirs: Iterable[str | Path] = (), *, key: str
) -> dict[str, Callable[..., Any]]:
    """Returns the public functions that a Python file defines, by name.

    Raises the errors of `resolve_function`, and UserError if the file defines no function.
    """
    what = f"{key} {show(file)}"
    module = _load_file(what, file, _folders(base_dirs))
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    if not found:
        raise UserError(f"{what}: expected at least one function, or file.py:function, found none")
    return found


def function_file(name: str, base_dirs: Iterable[str | Path] = ()) -> Path | None:
    """Returns the file that contains a function found by `resolve_function`, or None if its module
    has no file.
    """
    place = name.rpartition(":")[0]
    if _is_file(place):
        candidates = (folder / Path(place).expanduser() for folder in _folders(base_dirs))
        return next(filter(Path.is_file, candidates), None)
    found = getattr(sys.modules.get(place), "__file__", None)
    return Path(found) if found and Path(found).is_file() else None


def own_answer(name: str, text: str) -> dict[str, Any]:
    """Returns the answer that the function named in `answer.form` finds in a text, or a message
    about the function's error.

    This function is called in a process with limits (see `runners.answers.forms`).
    """
    try:
        found = resolve_function(name, key="answer.form", takes=["text"])(text)
        return {"answer": None if found is None else value_text(found).strip()}
    except Exception as error:
        return {"error": error_line(error, function_file(name))}


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _folders(base_dirs: Iterable[str | Path]) -> list[Path]:
    return [Path(folder).expanduser().resolve() for folder in base_dirs] or [Path.cwd()]


def _load_file(what: str, place: str, dirs: Sequence[Path]) -> ModuleType:
    candidates = [folder / Path(place).expanduser() for folder in dirs]
    path = next(filter(Path.is_file, candidates), None)
    if path is None:
        raise UserError(f"{what}: no file at {' or '.join(map(str, candidates))}")
    if path.suffix != ".py":
        raise UserError(f"{what}: {path.name} is not a Python file; its name must end in .py")
    path = path.resolve()
    _extend_path([path.parent])
    importlib.invalidate_caches()
    # By the name that a neighbour, or a process of a pool, imports it by, unless another module has
    # it.
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        namesake = known.__spec__
    else:
        namesake = importlib.util.find_spec(name) if name.isidentifier() else None
    if namesake is None or namesake.origin is None or Path(namesake.origin).resolve() != path:
        name = re.sub(r"\W", "_", str(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a name that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{what}: importing {path} failed: {error_line(error, path)}") from error
    return module


def _load_module(what: str, place: str, dirs: Sequence[Path]) -> ModuleType:
    _extend_path(dirs)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{place}.".startswith(f"{missing}."):
            raise UserError(f"{what}: importing {place} failed: {error_line(error)}") from error
        looked = f"no module named {missing} on Python's path or in {', '.join(map(str, dirs))}"
        raise UserError(f"{what}: {looked}; for a file, use path/to/file.py:function") from error


def _extend_path(dirs: Iterable[Path]) -> None:
    # At the end, so that a module next to the file never hides an installed module.
    sys.path.extend(str(folder) for folder in dirs if str(folder) not in sys.path)
