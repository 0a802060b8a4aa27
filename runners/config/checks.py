"""Checks beyond a single key: that files exist, and that keys fit each other. Nothing is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from runners.config.conditions import CONDITION_FORM, Condition, unknown_metric
from runners.config.judge_checks import check_judge, check_names, resolved_path
from runners.config.reading import PRESET_FOLDER, Settings
from runners.config.sections import (
    CALCULATOR,
    EMBEDDED,
    JUDGE_PREFIX,
    REWARD_NAMES,
    SHIPPED,
    DataConfig,
    EnvConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    judge_of,
)
from runners.config.user_functions import FUNCTION_FORMS
from runners.errors import did_you_mean, show

WANTED_MODEL = f'"{EMBEDDED}", a model folder or a name on the Hugging Face Hub'
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


# Keys with the only value that goes with optim.shard = true, and with data.image.
_NOT_SHARDED = {
    "model.master": "float32",
    "optim.moments": "float32",
    "rollout.quantization": "none",
    "loss.ref_quantization": "none",
}
_NOT_WITH_IMAGES = {
    "model.loader": "",
    "env.factory": "",
    "env.tools": [],
    "loss.router_aux_coef": 0.0,
    "loss.router_replay": False,
}


def check_sections(built: dict[str, Any], found: Settings) -> dict[str, Any]:
    """The sections with their paths resolved. A section that is None had faults and is left alone.

    Faults go to `found.problems`, one line each.
    """
    result = dict(built)
    for name, check in (("run", _run), ("model", _model), ("data", _data), ("reward", _reward)):
        if built[name] is not None:
            result[name] = check(built[name], found)
    _judges(result, found)
    _lengths(built, found)
    _roles(built, found)
    _sharding(built, found)
    _conditions(built, found)
    _environment(built, found)
    _images(built, found)
    if built["env"] is not None:
        result["env"] = _env(built["env"], found)
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
    if model.loader:
        model = attrs.evolve(model, loader=_function(model.loader, "model.loader", FUNCTION_FORMS, found))
    if model.path in SHIPPED:
        return model
    path = _existing(model.path, found)
    if path is None:
        _not_local(model.path, (".safetensors",), "model.path", WANTED_MODEL, found)
        return model
    if not os.path.isdir(path):
        _problem(found, "model.path", f"found the file {path}, want the folder of a model")
    return attrs.evolve(model, path=path)


def _data(data: DataConfig, found: Settings) -> DataConfig:
    if data.transform:
        data = attrs.evolve(
            data, transform=_function(data.transform, "data.transform", FUNCTION_FORMS, found)
        )
    if data.image_folder:
        folder = _existing(data.image_folder, found)
        if folder is None or not os.path.isdir(folder):
            _problem(found, "data.image_folder", f"no such folder: {show(data.image_folder)}")
        data = attrs.evolve(data, image_folder=folder or data.image_folder)
    if data.source in SHIPPED:
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


def _judges(built: dict[str, Any], found: Settings) -> None:
    """The judges of `built`, with the folders of classifiers resolved."""
    judges, reward = built["judge"], built["reward"]

    def fault(key: str, message: str) -> None:
        _problem(found, key, message)

    for name, judge in (judges or {}).items():
        check_judge(name, judge, fault, found.notices.append)
        judges[name] = resolved_path(judge, lambda path: _existing(path, found))
        key = f"{JUDGE_PREFIX}{name}.path"
        if judge.path and judges[name] is judge and judge.path not in SHIPPED:
            _not_local(judge.path, (".safetensors",), key, WANTED_MODEL, found)
    if judges is not None and reward is not None:
        check_names(reward, judges, fault, found.notices.append)


def _function(name: str, key: str, want: str, found: Settings) -> str:
    """A custom function as a config names it, with the path of a Python file resolved."""
    module, colon, function = name.rpartition(":")
    path = None
    if not colon or not function.isidentifier():
        _problem(found, key, f"found {show(name)}, want {want}")
    elif not module.endswith(".py"):
        if not all(part.isidentifier() for part in module.split(".")):
            _problem(found, key, f"found {show(name)}, want {want}")
    else:
        path = _existing(module, found)
        if path is None or not os.path.isfile(path):
            _problem(found, key, f"no such file: {show(module)}")
    return f"{path}:{function}" if path else name


def _reward_function(name: str, found: Settings) -> str:
    """One entry of reward.functions."""
    if name in REWARD_NAMES or judge_of(name) is not None:
        return name  # judges are checked when all tables have been read
    want = f"a built-in reward, {FUNCTION_FORMS}"
    if ":" not in name:
        want += did_you_mean(name, REWARD_NAMES) or f"; built in are {', '.join(REWARD_NAMES)}"
    return _function(name, "reward.functions", want, found)


def _lengths(built: dict[str, Any], found: Settings) -> None:
    rollout, loss, optim = built["rollout"], built["loss"], built["optim"]
    if rollout and loss and loss.overlong and loss.overlong.buffer > rollout.max_new_tokens:
        want = f"at most rollout.max_new_tokens = {rollout.max_new_tokens}"
        _problem(found, "loss.overlong.buffer", f"found {loss.overlong.buffer}, want {want}")
    if rollout and optim and optim.minibatches > optim.batch_size * rollout.num_generations:
        rows = optim.batch_size * rollout.num_generations
        want = f"at most {rows}, the completions of a batch step"
        _problem(found, "optim.minibatches", f"found {optim.minibatches}, want {want}")


def _roles(built: dict[str, Any], found: Settings) -> None:
    """Rejects quantized roles that have no meaning."""
    rollout, loss, model = built["rollout"], built["loss"], built["model"]
    if rollout and loss and rollout.group_size:
        modes = {rollout.quantization, loss.ref_quantization} - {"none"}
        if modes and not any(mode.startswith("affine") for mode in modes):
            want = f"0: a group of {' or '.join(sorted(modes))} has one size, which is part of the format"
            _problem(found, "rollout.group_size", f"found {rollout.group_size}, want {want}")
    if not loss or loss.ref_quantization == "none":
        return
    said = f"found {show(loss.ref_quantization)}"
    if model and model.tune != "full":
        _problem(
            found,
            "loss.ref_quantization",
            f'{said} with model.tune = "{model.tune}", where the reference is the base itself, without its '
            'adapters, at no cost; want "none"',
        )
    if loss.ref_sync_every and loss.ref_mixup < 1:
        _problem(
            found,
            "loss.ref_mixup",
            f"found {show(loss.ref_mixup)} with loss.ref_quantization = {show(loss.ref_quantization)}, which "
            "keeps no full-precision reference to mix with; want 1.0, or loss.ref_sync_every = 0",
        )


def _sharding(built: dict[str, Any], found: Settings) -> None:
    """Rejects keys that cannot be combined with optim.shard: the numbers would differ."""
    optim, loss = built["optim"], built["loss"]
    if not (optim and optim.shard):
        return
    _exclude(built, found, "optim.shard = true", _NOT_SHARDED)
    if loss and loss.ref_sync_every and loss.ref_mixup < 1:
        _problem(found, "loss.ref_mixup", f"found {show(loss.ref_mixup)} with optim.shard = true, want 1.0")


def _exclude(built: dict[str, Any], found: Settings, cause: str, wants: dict[str, Any]) -> None:
    """Rejects keys whose value is not the one that goes with `cause`."""
    for key, want in wants.items():
        section, _, name = key.partition(".")
        value = getattr(built[section], name, want)  # a section with faults is None
        value = list(value) if isinstance(value, tuple) else value
        if value != want:
            _problem(found, key, f"found {show(value)} with {cause}, want {show(want)}")


def _env(env: EnvConfig, found: Settings) -> EnvConfig:
    """With the paths of Python files resolved."""
    want = f"{FUNCTION_FORMS}, or a file whose functions are tools"
    tools = []
    for name in env.tools:
        if name.endswith(".py"):
            path = _existing(name, found)
            if path is None or not os.path.isfile(path):
                _problem(found, "env.tools", f"no such file: {show(name)}")
            tools.append(path or name)
        else:
            tools.append(_function(name, "env.tools", want, found))
    factory = env.factory
    if factory and factory != CALCULATOR:
        want = f'"{CALCULATOR}" or a class, {FUNCTION_FORMS}'
        factory = _function(factory, "env.factory", want + did_you_mean(factory, [CALCULATOR]), found)
    return attrs.evolve(env, factory=factory, tools=tuple(tools))


def _environment(built: dict[str, Any], found: Settings) -> None:
    """Checks that there are rewards and answers, unless an environment gives the rewards."""
    env, reward = built["env"], built["reward"]
    plays = env is not None and env.factory and env.factory != CALCULATOR
    if built["data"] and not built["data"].answer and not plays:
        want = "a column, or an env.factory whose class has get_reward"
        _problem(found, "data.answer", f'found "", want {want}')
    if reward and not reward.functions and (env is None or not env.factory):
        want = "at least one entry, or an env.factory whose class has get_reward"
        _problem(found, "reward.functions", f"found [], want {want}")


def _images(built: dict[str, Any], found: Settings) -> None:
    """Rejects keys that cannot be combined with prompts with images."""
    data = built["data"]
    if data is None or not data.image:
        for key, off in (("image_max_pixels", 0), ("image_folder", "")):
            value = off if data is None else getattr(data, key)
            if value != off:
                want = f"{show(off)}, or the column of images in data.image"
                _problem(found, f"data.{key}", f"found {show(value)}, want {want}")
        return
    _exclude(built, found, "data.image", _NOT_WITH_IMAGES)


def _conditions(built: dict[str, Any], found: Settings) -> None:
    """Rejects conditions of stop.when that cannot be read, or that name a metric that is not logged."""
    stop, reward = built["stop"], built["reward"]
    for text in stop.when if stop else ():
        condition = Condition.parse(text)
        if condition is None:
            _problem(found, "stop.when", f"found {show(text)}, want {CONDITION_FORM}")
            continue
        near = unknown_metric(condition.metric, reward.functions) if reward else None
        if near is not None:
            hint = (
                f"; did you mean {near}?"
                if near
                else ", as training_log.jsonl has them: em, reward, kl, entropy, ..."
            )
            _problem(found, "stop.when", f"found {show(text)}, want a number of the log{hint}")


def _existing(path: str, found: Settings) -> str | None:
    """The first that exists: `path` itself, with ~ expanded, or beside the config file."""
    expanded = os.path.expanduser(path)
    beside = os.path.normpath(os.path.join(found.folder, expanded))
    return next((candidate for candidate in (expanded, beside) if os.path.exists(candidate)), None)


def _not_local(name: str, suffixes: tuple[str, ...], key: str, want: str, found: Settings) -> None:
    """Adds a fault if a name is neither a file nor a possible Hub name."""
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", *suffixes)) or name.count("/") > 1
    if is_path or "\\" in name:
        relative = not os.path.isabs(os.path.expanduser(name))
        elsewhere = relative and found.folder.resolve() not in (Path.cwd(), PRESET_FOLDER)
        looked = f", neither here nor in {found.folder}" if elsewhere else ""
        _problem(found, key, f"no such file or folder: {show(name)}{looked}")
    elif not _HUB_NAME.fullmatch(name):
        _problem(found, key, f"found {show(name)}, want {want}")
