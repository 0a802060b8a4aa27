"""Checks beyond a single key: that files exist, and that keys fit each other. Nothing is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from runners.config.conditions import condition_fault
from runners.config.judge_checks import check_judge, check_names
from runners.config.reading import PRESET_FOLDER, Settings
from runners.config.sections import CALCULATOR, EMBEDDED, REWARD_NAMES, SHIPPED, judge_of
from runners.config.user_functions import FUNCTION_FORMS
from runners.errors import did_you_mean, show

EXPECTED_MODEL = f'"{EMBEDDED}", a model folder or a name on the Hugging Face Hub'
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_EXPECTED_DATA = f'"{EMBEDDED}", a file or folder ({", ".join(_DATA_SUFFIXES)}) or a name on the Hub'
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

# A key and its value → keys with the only value that goes with it.
_ONLY_WITH = {
    "optim.shard": {
        "model.master": "float32",
        "optim.moments": "float32",
        "rollout.quantization": "none",
        "loss.ref_quantization": "none",
    },
    "data.image": {
        "model.loader": "",
        "env.factory": "",
        "env.tools": (),
        "loss.router_aux_coef": 0.0,
        "loss.router_replay": False,
    },
}


def check_sections(built: dict[str, Any], found: Settings) -> dict[str, Any]:
    """The sections with their paths resolved. A section that is None had faults and is left alone.

    Faults go to `found.problems`, one line each.
    """
    result = dict(built)
    checked = {"run": _run, "model": _model, "data": _data, "reward": _reward, "env": _env}
    for name, check in checked.items():
        if built[name] is not None:
            result[name] = attrs.evolve(built[name], **check(built[name], found))
    for name, judge in (built["judge"] or {}).items():
        check_judge(name, judge, found)
        path = _source(judge.path, f"judge.{name}.path", (".safetensors",), EXPECTED_MODEL, found)
        result["judge"][name] = attrs.evolve(judge, path=path)
    if built["judge"] is not None and built["reward"] is not None:
        check_names(result["reward"], built["judge"], found)
    _relations(result, found)
    return result


def _fault(found: Settings, key: str, message: str) -> None:
    found.fault(tuple(key.split(".")), message)


def _run(run: Any, found: Settings) -> dict[str, Any]:
    folder = os.path.expanduser(run.output_dir)
    for path, key in ((folder, "run.output_dir"), (os.path.join(folder, run.name), "run.name")):
        if os.path.exists(path) and not os.path.isdir(path):
            _fault(found, key, f"expected a folder or a free name, found the file {path}")
            break
    return {"output_dir": folder}


def _model(model: Any, found: Settings) -> dict[str, Any]:
    path = _source(model.path, "model.path", (".safetensors",), EXPECTED_MODEL, found)
    if path not in SHIPPED and os.path.isfile(path):
        _fault(found, "model.path", f"expected the folder of a model, found the file {path}")
    return {"path": path, "loader": _function(model.loader, "model.loader", FUNCTION_FORMS, found)}


def _data(data: Any, found: Settings) -> dict[str, Any]:
    folder = _existing(data.image_folder, found) if data.image_folder else ""
    if data.image_folder and (folder is None or not os.path.isdir(folder)):
        _fault(found, "data.image_folder", f"no such folder: {show(data.image_folder)}")
    source = _source(data.source, "data.source", _DATA_SUFFIXES, _EXPECTED_DATA, found)
    # The Hub has two configurations of GSM8K and no default.
    is_gsm8k = source == "openai/gsm8k" and not os.path.exists(source)
    return {
        "source": source,
        "name": data.name or ("main" if is_gsm8k else ""),
        "image_folder": folder or data.image_folder,
        "transform": _function(data.transform, "data.transform", FUNCTION_FORMS, found),
    }


def _reward(reward: Any, found: Settings) -> dict[str, Any]:
    functions, weights = reward.functions, reward.weights
    if weights and len(weights) != len(functions):
        expected = f"{len(functions)}, one for each of reward.functions"
        _fault(found, "reward.weights", f"expected {expected}, found {len(weights)}")
    elif weights and not any(weights):
        _fault(found, "reward.weights", f"expected one that is not 0, found {show(weights)}")
    return {"functions": tuple(_reward_function(name, found) for name in functions)}


def _reward_function(name: str, found: Settings) -> str:
    """One entry of reward.functions."""
    if name in REWARD_NAMES or judge_of(name) is not None:
        return name
    hint = did_you_mean(name, REWARD_NAMES) or f"; built in are {', '.join(REWARD_NAMES)}"
    expected = f"a built-in reward, {FUNCTION_FORMS}"
    return _function(name, "reward.functions", expected, found, "" if ":" in name else hint)


def _env(env: Any, found: Settings) -> dict[str, Any]:
    expected = f"{FUNCTION_FORMS}, or a file whose functions are tools"
    tools = tuple(
        (_python_file(name, "env.tools", found) or name)
        if name.endswith(".py")
        else _function(name, "env.tools", expected, found)
        for name in env.tools
    )
    factory = env.factory
    if factory != CALCULATOR:
        expected, hint = f'"{CALCULATOR}" or a class, {FUNCTION_FORMS}', did_you_mean(factory, [CALCULATOR])
        factory = _function(factory, "env.factory", expected, found, hint)
    return {"tools": tools, "factory": factory}


def _function(name: str, key: str, expected: str, found: Settings, hint: str = "") -> str:
    """A custom function as a config names it, with the path of a Python file resolved; empty: none."""
    module, colon, function = name.rpartition(":")
    if not name:
        return name
    is_file = module.endswith(".py")
    if (
        not colon
        or not function.isidentifier()
        or not (is_file or all(part.isidentifier() for part in module.split(".")))
    ):
        _fault(found, key, f"expected {expected}, found {show(name)}{hint}")
    path = _python_file(module, key, found) if is_file and function.isidentifier() else None
    return f"{path}:{function}" if path else name


def _python_file(name: str, key: str, found: Settings) -> str | None:
    path = _existing(name, found)
    if path is not None and os.path.isfile(path):
        return path
    _fault(found, key, f"no such file: {show(name)}")
    return None


def _relations(built: dict[str, Any], found: Settings) -> None:
    """Rejects keys that do not fit each other. Sections that are None had faults."""
    have = {name for name, section in built.items() if section is not None}

    def value(key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(built[section], name) if section in have else None

    def expect(key: str, expected: str, shown: object = None) -> None:
        _fault(found, key, f"expected {expected}, found {show(value(key) if shown is None else shown)}")

    overlong, most = value("loss.overlong"), value("rollout.max_new_tokens")
    if overlong and most is not None and overlong.buffer > most:
        expect("loss.overlong.buffer", f"at most rollout.max_new_tokens = {most}", overlong.buffer)
    if {"rollout", "optim"} <= have:
        rows = value("optim.batch_size") * value("rollout.num_generations")
        if value("optim.minibatches") > rows:
            expect("optim.minibatches", f"at most {rows}, the completions of a batch step")
    modes = {value("rollout.quantization"), value("loss.ref_quantization")} - {"none", None}
    if value("rollout.group_size") and modes and not any(map(built["rollout"].group_size_of, modes)):
        expect("rollout.group_size", f"0 with {' and '.join(sorted(modes))}, whose groups have a fixed size")
    mixes = value("loss.ref_sync_every") and value("loss.ref_mixup") < 1
    if (reference := value("loss.ref_quantization")) not in ("none", None):
        if value("model.tune") in ("lora", "dora"):
            tune = f"model.tune = {show(value('model.tune'))}, where the reference is the unchanged base"
            expect("loss.ref_quantization", f'"none" with {tune}')
        if mixes:
            cause = f"loss.ref_quantization = {show(reference)}, which keeps nothing to mix with"
            expect("loss.ref_mixup", f"1.0, or loss.ref_sync_every = 0, with {cause}")
    if value("optim.shard") and mixes:
        expect("loss.ref_mixup", "1.0 with optim.shard = true")
    for cause, only in _ONLY_WITH.items():
        if value(cause):
            for key, one in only.items():
                if value(key) not in (one, None):
                    expect(key, f"{show(one)} with {cause} = {show(value(cause))}")
    plays = value("env.factory") not in ("", CALCULATOR, None)
    if value("data.answer") == "" and not plays:
        expect("data.answer", "a column, or an env.factory whose class has get_reward")
    if value("reward.functions") == () and not value("env.factory"):
        expect("reward.functions", "at least one entry, or an env.factory whose class has get_reward")
    for key in ("data.image_max_pixels", "data.image_folder") if value("data.image") == "" else ():
        if value(key):
            expect(key, f"{show(type(value(key))())}, or the column of images in data.image")
    for text in value("stop.when") or ():
        if "reward" in have and (fault := condition_fault(text, value("reward.functions"))):
            _fault(found, "stop.when", fault)


def _existing(path: str, found: Settings) -> str | None:
    """The first that exists: `path` itself, with ~ expanded, or beside the config file."""
    expanded = os.path.expanduser(path)
    beside = os.path.normpath(os.path.join(found.folder, expanded))
    return next((candidate for candidate in (expanded, beside) if os.path.exists(candidate)), None)


def _source(name: str, key: str, suffixes: tuple[str, ...], expected: str, found: Settings) -> str:
    """The path of a model or of data; a shipped name and a possible name on the Hub stay as they are."""
    if name in SHIPPED or not name:
        return name
    path = _existing(name, found)
    if path is not None:
        return path
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", *suffixes)) or name.count("/") > 1
    if is_path or "\\" in name:
        relative = not os.path.isabs(os.path.expanduser(name))
        elsewhere = relative and found.folder.resolve() not in (Path.cwd(), PRESET_FOLDER)
        looked = f", neither here nor in {found.folder}" if elsewhere else ""
        _fault(found, key, f"no such file or folder: {show(name)}{looked}")
    elif not _HUB_NAME.fullmatch(name):
        _fault(found, key, f"expected {expected}, found {show(name)}")
    return name
