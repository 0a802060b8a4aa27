"""The keys that are read from a model's untrusted JSON files, and what each may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runners.errors import UserError, show
from runners.files.json_files import read_json

Rule = tuple[Callable[[Any], bool], str]  # whether a value is accepted (None: missing, or null); the wish


def check_keys(table: Mapping[str, Any], file: Path, rules: Mapping[str, Rule]) -> None:
    """Raises UserError, with the file, the key and what it holds, for the first value that breaks its rule.

    A key "a.b" is the key b of the table a, if there is such a table.
    """
    for key, (accepts, wanted) in rules.items():
        outer, _, inner = key.rpartition(".")
        part = table.get(outer) if outer else table
        if isinstance(part, Mapping) and not accepts(part.get(inner)):
            value = part.get(inner)
            found = "nothing" if value is None else show(value)
            raise UserError(f"{file}: {key}: expected {wanted}, found {found}")


def check_config(config: Mapping[str, Any], file: Path, *, custom_loader: bool = False) -> None:
    """Checks the object in a config.json; of one for a custom loader only the keys that are read here."""
    check_keys(config, file, _ANY_MODEL if custom_loader else _MODEL)


def check_adapter_config(settings: Mapping[str, Any], file: Path) -> None:
    """Checks the object in an adapter_config.json: every key that mlx-lm uses for LoRA and DoRA."""
    check_keys(settings, file, _ADAPTERS)


def check_peft_config(settings: Mapping[str, Any], file: Path) -> None:
    """Checks the object in PEFT's adapter_config.json: every key that is read, and that its kind is LoRA."""
    check_keys(settings, file, _PEFT)


def end_ids(folder: Path) -> list[int] | None:
    """The end-of-text tokens of a model folder: generation_config.json's, else config.json's; None: neither
    names any. Raises UserError for anything but token ids."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        stated = read_json(file) if file.is_file() else {}
        check_keys(stated, file, _END_IDS)
        found = stated.get("eos_token_id")
        if found is not None and found != []:
            return found if isinstance(found, list) else [found]
    return None


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def _is_list(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _optional(accepts: Callable[[Any], bool], wanted: str) -> Rule:
    return lambda value: value is None or accepts(value), wanted


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_ID = _whole(0)
_COUNT = _optional(_whole(1), "a whole number from 1 on")
_SIZE = _optional(_whole(0), "a whole number from 0 on")
_POSITIVE = _optional(lambda value: _number(value) and value > 0, "a positive number")
_TEXT, _TABLE = _optional(_is(str), "a text"), _optional(_is(dict), "a JSON object")
# Modules are built layer by layer before weights are checked: a billion layers would never end.
_LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_LAYERS = _optional(_whole(0, 10_000), "a whole number of at most 10,000")

_END_IDS = {"eos_token_id": _optional(lambda value: _ID(value) or _is_list(_ID)(value), "token ids")}
_ANY_MODEL: dict[str, Rule] = {
    **_END_IDS,
    "vocab_size": _SIZE,
    "text_config": _TABLE,
    "text_config.vocab_size": _SIZE,
}
_MODEL: dict[str, Rule] = {
    "model_type": (_is(str), "a text"),
    **_ANY_MODEL,
    "architectures": _optional(_is_list(_is(str)), "a list of texts"),
    "id2label": _TABLE,
    "image_token_id": _optional(_ID, "a token id"),
    "model_file": _TEXT,
    "tie_word_embeddings": _optional(_is(bool), "true or false"),
    **dict.fromkeys(("torch_dtype", "dtype", "quantization.mode"), _TEXT),
    **dict.fromkeys(("quantization", "quantization_config", "vision_config"), _TABLE),
    **dict.fromkeys(("quantization.bits", "quantization.group_size"), _COUNT),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _TABLE),
    **dict.fromkeys(("rope_parameters.rope_theta", "rope_parameters.factor"), _POSITIVE),
    **dict.fromkeys(("text_config.rope_scaling", "text_config.rope_parameters"), _TABLE),
    **dict.fromkeys(_LAYER_COUNTS, _LAYERS),
    **{f"text_config.{key}": _LAYERS for key in _LAYER_COUNTS},
}
_ADAPTERS: dict[str, Rule] = {
    "fine_tune_type": (lambda value: value in (None, "lora", "dora"), "lora or dora"),
    "num_layers": (_whole(-1), "a number of layers, or -1 for all"),
    "lora_parameters": (_is(dict), "a JSON object with rank, scale and dropout"),
    "lora_parameters.rank": (_whole(1), "a whole number from 1 on"),
    "lora_parameters.scale": (_number, "a finite number"),
    "lora_parameters.dropout": (lambda x: _number(x) and 0 <= x < 1, "a number from 0 to below 1"),
    "lora_parameters.keys": _optional(_is_list(_is(str)), "a list of layers' names"),
}
_PEFT: dict[str, Rule] = {
    "peft_type": (lambda value: value == "LORA", "LORA"),
    "lora_alpha": (lambda value: _number(value) and value != 0, "a number other than 0"),
    "alpha_pattern": _optional(
        lambda table: isinstance(table, dict) and all(_number(x) and x for x in table.values()),
        "a JSON object of numbers other than 0",
    ),
    "bias": (lambda value: value in (None, "none"), "none"),
    **dict.fromkeys(("use_dora", "use_rslora"), _optional(_is(bool), "true or false")),
    "base_model_name_or_path": _TEXT,
}
