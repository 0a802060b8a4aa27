"""What no key can tell alone: that files exist, and that keys fit each other. Nothing is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from runners.errors import did_you_mean, show
from runners.sections import EMBEDDED, REWARD_NAMES, DataConfig, ModelConfig, RewardConfig, RunConfig
from runners.settings import PRESET_FOLDER, Settings

WANTED_MODEL = f'"{EMBEDDED}", a model folder or a name on the Hugging Face Hub'
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_sections(built: dict[str, Any], found: Settings) -> dict[str, Any]:
    """The sections with their paths resolved. A section that is None had faults and is left alone.

    Faults go to `found.problems`, one line each.
    """
    result = dict(built)
    for name, check in (("run", _run), ("model", _model), ("data", _data), ("reward", _reward)):
        if built[name] is not None:
            result[name] = check(built[name], found)
    _lengths(built, found)
    return result


def _problem(found: Settings, key: str, message: str) -> None:
    found.problems.append(f"{found.where(tuple(key.split('.')))}: {message}")


def _run(run: RunConfig, found: Settings) -> RunConfig:
    folder = os.path.expanduser(run.output_dir)
    for path, key in ((folder, "run.output_dir"), (os.path.join(folder, run.name), "run.name")):
        if os.path.exists(path) and not os.path.isdir(path):
            _problem(found, key, f"found the file {path}, want a folder or a name that is free")
            break
    return attrs.evolve(run, output_dir=folder)


def _model(model: ModelConfig, found: Settings) -> ModelConfig:
    if model.path == EMBEDDED:
        return model
    path = _existing(model.path, found)
    if path is None:
        _not_local(model.path, (".safetensors",), "model.path", WANTED_MODEL, found)
        return model
    if not os.path.isdir(path):
        _problem(found, "model.path", f"found the file {path}, want the folder of a model")
    return attrs.evolve(model, path=path)


def _data(data: DataConfig, found: Settings) -> DataConfig:
    if data.source == EMBEDDED:
        return data
    path = _existing(data.source, found)
    if path is not None:
        return attrs.evolve(data, source=path)
    want = f'"{EMBEDDED}", a file or folder ({", ".join(_DATA_SUFFIXES)}) or a name on the Hugging Face Hub'
    _not_local(data.source, _DATA_SUFFIXES, "data.source", want, found)
    if data.source == "openai/gsm8k" and not data.name:
        return attrs.evolve(data, name="main")  # the Hub has two configurations of it and no default
    return data


def _reward(reward: RewardConfig, found: Settings) -> RewardConfig:
    functions = tuple(_reward_function(name, found) for name in reward.functions)
    if reward.weights and len(reward.weights) != len(functions):
        _problem(
            found,
            "reward.weights",
            f"found {len(reward.weights)}, want {len(functions)}: one for each of reward.functions",
        )
    elif reward.weights and not any(reward.weights):
        _problem(found, "reward.weights", f"found {show(reward.weights)}, want one that is not 0")
    return attrs.evolve(reward, functions=functions)


def _reward_function(name: str, found: Settings) -> str:
    """One entry of reward.functions, with the path of a Python file resolved."""
    module, colon, function = name.rpartition(":")
    want = "one of ours, package.module:function or path/to/file.py:function"
    if not colon:
        if name not in REWARD_NAMES:
            hint = did_you_mean(name, REWARD_NAMES) or f"; ours are {', '.join(REWARD_NAMES)}"
            _problem(found, "reward.functions", f"found {show(name)}, want {want}{hint}")
        return name
    if not function.isidentifier():
        _problem(found, "reward.functions", f"found {show(name)}, want {want}")
        return name
    if not module.endswith(".py"):
        if not all(part.isidentifier() for part in module.split(".")):
            _problem(found, "reward.functions", f"found {show(name)}, want {want}")
        return name
    path = _existing(module, found)
    if path is None or not os.path.isfile(path):
        _problem(found, "reward.functions", f"no such file: {show(module)}")
        return name
    return f"{path}:{function}"


def _lengths(built: dict[str, Any], found: Settings) -> None:
    rollout, loss, optim = built["rollout"], built["loss"], built["optim"]
    if rollout and loss and loss.overlong and loss.overlong.buffer > rollout.max_new_tokens:
        want = f"at most rollout.max_new_tokens = {rollout.max_new_tokens}"
        _problem(found, "loss.overlong.buffer", f"found {loss.overlong.buffer}, want {want}")
    if rollout and optim and optim.minibatches > optim.batch_size * rollout.num_generations:
        rows = optim.batch_size * rollout.num_generations
        want = f"at most {rows}, the completions of a batch step"
        _problem(found, "optim.minibatches", f"found {optim.minibatches}, want {want}")


def _existing(path: str, found: Settings) -> str | None:
    """`path` as it stands, from the home folder or beside the config file: the first that exists."""
    expanded = os.path.expanduser(path)
    beside = os.path.normpath(os.path.join(found.folder, expanded))
    return next((candidate for candidate in (expanded, beside) if os.path.exists(candidate)), None)


def _not_local(name: str, suffixes: tuple[str, ...], key: str, want: str, found: Settings) -> None:
    """A fault where a name that is no file can be no Hub name either."""
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", *suffixes)) or name.count("/") > 1
    if is_path or "\\" in name:
        relative = not os.path.isabs(os.path.expanduser(name))
        elsewhere = relative and found.folder.resolve() not in (Path.cwd(), PRESET_FOLDER)
        looked = f", neither here nor in {found.folder}" if elsewhere else ""
        _problem(found, key, f"no such file or folder: {show(name)}{looked}")
    elif not _HUB_NAME.fullmatch(name):
        _problem(found, key, f"found {show(name)}, want {want}")
