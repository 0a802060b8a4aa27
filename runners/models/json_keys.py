"""Defines which keys are read from a model's untrusted JSON files, and their valid values."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.errors import UserError, listed, show
from runners.files.json_files import read_json

# whether a value is accepted (None means missing or null); a description of valid values
Rule = tuple[Callable[[Any], bool], str]


def check_keys(table: Mapping[str, Any], file: Path, rules: Mapping[str, Rule]) -> None:
    """Raises UserError for the first value that breaks its rule. The message contains the file, the
    key and the value.

    A key "a.b" means the key b in the table a, if there is such a table.
    """
    for key, (accepts, wanted) in rules.items():
        outer, _, inner = key.rpartition(".")
        part = table.get(outer) if outer else table
        if isinstance(part, Mapping) and not accepts(part.get(inner)):
            found = "nothing" if part.get(inner) is None else show(part[inner])
            raise UserError(f"{file}: {key}: expected {wanted}, found {found}")


def end_ids(folder: Path) -> list[int] | None:
    """Returns a model folder's end-of-text tokens, from generation_config.json or config.json, or
    None if neither file names any. Raises UserError for anything but token ids.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        stated = read_json(file) if file.is_file() else {}
        check_keys(stated, file, _END_IDS)
        found = stated.get("eos_token_id")
        if found is not None and found != []:
            return found if isinstance(found, list) else [found]
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _optional(accepts: Callable[[Any], bool], wanted: str) -> Rule:
    return lambda value: value is None or accepts(value), wanted


def _is_ids(value: Any) -> bool:
    return all(map(_whole(0), value if isinstance(value, list) else [value]))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SIZE = _optional(_whole(0), "an integer from 0")
_TEXT = _optional(lambda value: isinstance(value, str), "a text")
_TABLE = _optional(lambda value: isinstance(value, dict), "a JSON object")
_BOOL = _optional(lambda value: isinstance(value, bool), "true or false")
# Modules are built layer by layer before weights are checked, so a billion layers would never end.
_LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_LAYERS = _optional(_whole(0, 10_000), "an integer of at most 10,000")

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")  # MLX's, for packed weights

_END_IDS = {"eos_token_id": _optional(_is_ids, "token ids")}
# config.json: the keys that are read here, and those whose bad values would crash mlx-lm.
ANY_MODEL = {
    **_END_IDS,
    "vocab_size": _SIZE,
    "text_config": _TABLE,
    "text_config.vocab_size": _SIZE,
}
MODEL: dict[str, Rule] = {
    "model_type": (lambda value: isinstance(value, str), "a text"),
    **ANY_MODEL,
    **dict.fromkeys(("quantization", "vision_config", "rope_scaling", "rope_parameters"), _TABLE),
    "quantization.bits": _optional(_whole(1, 8), "an integer from 1 to 8"),
    "quantization.group_size": _optional(_whole(1, 1024), "an integer from 1 to 1,024"),
    "quantization.mode": _optional(lambda value: value in _MODES, listed(_MODES)),
    **dict.fromkeys(_LAYER_COUNTS, _LAYERS),
    **dict.fromkeys((f"text_config.{key}" for key in _LAYER_COUNTS), _LAYERS),
}
ADAPTERS: dict[str, Rule] = {  # adapter_config.json: keys that mlx-lm uses for LoRA and DoRA
    "fine_tune_type": (lambda value: value in (None, "lora", "dora"), "lora or dora"),
    "num_layers": (_whole(-1), "a number of layers, or -1 for all"),
    "lora_parameters": (lambda value: isinstance(value, dict), "a JSON object with rank and scale"),
    "lora_parameters.rank": (_whole(1), "an integer from 1"),
    "lora_parameters.scale": (_is_number, "a finite number"),
    "lora_parameters.keys": _optional(_is_names, "a list of layers' names"),
}
NANOCHAT_SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
NANOCHAT: dict[str, Rule] = {  # a nanochat checkpoint's meta_*.json
    "model_config": (lambda value: isinstance(value, dict), "a JSON object with the model's sizes"),
    **dict.fromkeys(
        (f"model_config.{name}" for name in NANOCHAT_SIZES), (_whole(1), "a positive integer")
    ),
}
# PEFT's keys that change the computation and have no equivalent in mlx-lm.
_ONLY_PEFT = (
    *("fan_in_fan_out", "lora_bias", "use_qalora", "layer_replication", "target_parameters"),
    *("alora_invocation_tokens", "trainable_token_indices", "modules_to_save"),
)
PEFT: dict[str, Rule] = {  # PEFT's: keys that are read, and the required kind, LoRA
    "peft_type": (lambda value: value == "LORA", "LORA"),
    "lora_alpha": (lambda value: _is_number(value) and value != 0, "a number other than 0"),
    "alpha_pattern": _optional(
        lambda table: isinstance(table, dict) and all(_is_number(x) and x for x in table.values()),
        "a JSON object whose values are nonzero numbers",
    ),
    "bias": (lambda value: value in (None, "none"), "none"),
    **dict.fromkeys(("use_dora", "use_rslora"), _BOOL),
    "base_model_name_or_path": _TEXT,
    **dict.fromkeys(
        _ONLY_PEFT, (lambda value: not value, "none, because mlx-lm's adapters do not support it")
    ),
}


def first_patterns(patterns: Sequence[str], names: Sequence[str]) -> list[str | None]:
    """Returns, for each layer, the first PEFT pattern that matches its name. This function runs in
    a process with limits.
    """
    return [
        next((each for each in patterns if re.match(rf"(.*\.)?({each})$", name)), None)
        for name in names
    ]
