"""The untrusted adapter_config.json: checks each key that mlx-lm uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runners.errors import UserError, did_you_mean, show

_KINDS = ("lora", "dora", "full")


def check_settings(settings: Mapping[str, Any], file: Path) -> None:
    """Raises UserError, with the key, what was found and what is wanted, unless mlx-lm can use all of it."""
    kind = settings.get("fine_tune_type", "lora")
    if kind not in _KINDS:
        near = did_you_mean(kind, _KINDS) if isinstance(kind, str) else ""
        raise _wrong(file, "fine_tune_type", kind, f"one of {', '.join(_KINDS)}{near}")
    if not _whole(settings.get("num_layers"), -1):
        raise _wrong(file, "num_layers", settings.get("num_layers"), "a number of layers, or -1 for all")
    if kind == "full":
        return
    table = settings.get("lora_parameters")
    if not isinstance(table, dict):
        raise _wrong(file, "lora_parameters", table, "a JSON object with rank, scale and dropout")
    for name, holds, wanted in _RULES:
        if not holds(table.get(name)):
            raise _wrong(file, f"lora_parameters.{name}", table.get(name), wanted)


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**31


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def _keys(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(key, str) for key in value))


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rank", lambda value: _whole(value, 1), "a whole number from 1 on"),
    ("scale", _number, "a finite number"),
    ("dropout", lambda value: _number(value) and 0 <= value < 1, "a number from 0 to below 1"),
    ("keys", _keys, "a list of layers' names"),
)


def _wrong(file: Path, key: str, value: Any, wanted: str) -> UserError:
    found = "nothing" if value is None else show(value)
    return UserError(f"{file}: {key}: found {found}, wanted {wanted}")
