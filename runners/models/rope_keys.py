"""Translates keys in config.json, mainly the rotary embedding's keys, to the names that mlx-lm's
modules read.

transformers 5 writes one table, `rope_parameters`, which contains θ, the rotated share of a head,
and the scaling, for the whole model or for each layer type. Most of mlx-lm's modules read
`rope_theta`, `rope_scaling`, `partial_rotary_factor` and similar keys instead, and use defaults if
these are missing. Some other keys have two names in transformers (`attribute_map`), which writes
only one of them.
"""

import dataclasses
import importlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from runners.errors import UserError, error_line, show, user_errors

# The types that mlx-lm's `initialize_rope` computes like transformers. Modules without it compute
# "default".
SCALED = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})
_OTHER_TYPES = {
    **dict.fromkeys(("deepseek", "nemotron"), ("default", "linear")),
    **dict.fromkeys(("internlm2", "internlm3"), ("default", "linear", "dynamic")),
    **dict.fromkeys(("phi3", "phimoe"), ("default", "longrope")),
    **dict.fromkeys(("hunyuan", "hunyuan_v1_dense"), ("default", "dynamic")),
    "deepseek_v2": ("yarn",),
    "deepseek_v41": (),
    "minicpm3": ("longrope",),
}
# Modules that read all of rope_parameters themselves.
_READ_IT = {
    *("gemma4_text", "glm_moe_dsa", "laguna", "mellum", "minimax_m3_vl", "ministral3", "mistral4"),
    *("muse_spark", "qwen3_5", "spark2_5"),
}
# The reader of the keys for models that have a text_config: "module" or "module:class".
_TEXT = {
    "deepseek_v41": "deepseek_v41",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n:TextConfig",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "kimi_vl:TextArgs",
    "lfm2-vl": "lfm2",
    "llama4": "llama4:TextArgs",
    "mistral3": "llama",
    "muse_glimmer": "muse_glimmer",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
_THETA = ("rope_theta", "rotary_emb_base")
_SHARE = ("partial_rotary_factor", "rotary_pct")
_SLIDING_THETA = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"


@attrs.frozen
class _Reader:
    name: str  # of mlx-lm's module
    keys: Collection[str]  # that it reads
    required: Collection[str]  # keys without a default
    types: Collection[str]  # that it computes

    def first(self, names: Collection[str]) -> str | None:
        """Returns the first of these keys that the module reads, or None."""
        return next((name for name in names if name in self.keys), None)

    def refuse(self, what: str, value: Any = "") -> UserError:
        """Returns the error for a setting that the module does not support."""
        stated = f" = {show(value)}" if value != "" else ""
        return UserError(f"rope_parameters: mlx-lm's {self.name} does not support {what}{stated}")


def with_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with mlx-lm's keys added to those that transformers 5 writes.

    Both transformers and mlx-lm read the result correctly. The config does not change if it has
    neither `rope_parameters` nor a renamed key, if mlx-lm's module reads transformers' keys itself,
    or if mlx-lm has no such module. An existing `rope_scaling` is kept, because both libraries
    prefer it.

    Raises UserError, with the key, if mlx-lm's module would compute something different.
    """
    nested = isinstance(config.get("text_config"), dict)
    reader = _reader(config)
    if reader is None:
        return config
    part = config["text_config"] if nested else config
    with user_errors(
        "rope_parameters: expected the format that transformers writes",
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        why=error_line,
    ):
        keys = _other_names(part, reader) | (
            _keys(part, reader) if part.get("rope_parameters") else {}
        )
    if not keys:
        return config
    return {**config, "text_config": {**part, **keys}} if nested else {**config, **keys}


def _reader(config: Mapping[str, Any]) -> _Reader | None:
    """Returns the module that reads the keys, or None if the keys stay unchanged."""
    if "model_file" in config or not isinstance(config.get("model_type"), str):
        return None
    from mlx_lm.utils import _get_classes

    try:
        module = str(_get_classes(dict(config))[1].__module__).rpartition(".")[2]
    except (ValueError, AttributeError, TypeError):  # no such architecture: loading it says so
        return None
    text = config.get("text_config")
    if isinstance(text, dict) and (module not in _TEXT or str(text.get("model_type")) in _READ_IT):
        return None
    module, _, kind = _TEXT.get(module, module).partition(":")
    if module in _READ_IT:
        return None
    arguments = getattr(importlib.import_module(f"mlx_lm.models.{module}"), kind or "ModelArgs")
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    required = [
        n for n, f in fields.items() if f.default is dataclasses.MISSING is f.default_factory
    ]
    modules = (sys.modules[each.__module__] for each in arguments.__mro__)
    scales = "rope_scaling" in fields and any(hasattr(m, "initialize_rope") for m in modules)
    types = _OTHER_TYPES.get(module, SCALED if scales else {"default"})
    return _Reader(module, fields.keys(), required, types)


def _other_names(config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """Returns required keys that transformers writes under another name, such as
    `num_local_experts` in qwen3_moe.
    """
    missing = [name for name in reader.required if name not in config]
    if not missing:
        return {}
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    names = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return {name: config[names[name]] for name in missing if names.get(name) in config}


def _keys(config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """Returns the keys to add to a config that has rope_parameters."""
    whole = config["rope_parameters"]
    keys = {}
    if any(isinstance(value, Mapping) for value in whole.values()):
        keys, whole = _by_layer(whole, config, reader)
    for key, names in (("rope_theta", _THETA), ("partial_rotary_factor", _SHARE)):
        value = whole.get(key)
        name = reader.first(names)
        if name is not None and value is not None:
            keys[name] = value
        elif key in _SHARE and value is not None and "rotary_dim" in reader.keys:
            keys["rotary_dim"] = int(config["head_dim"] * value)
        elif value not in (None, 1):
            raise reader.refuse(key, value)
    kind = _type(whole)
    if kind not in reader.types:
        raise reader.refuse("rope_type", kind)
    if kind != "default" and not config.get("rope_scaling"):
        keys["rope_scaling"] = _scaling(kind, whole, config, reader)
        if reader.name in ("phi3", "phimoe"):  # they read it outside the table
            keys[_ORIGINAL] = keys["rope_scaling"][_ORIGINAL]
    elif "rope_scaling" in reader.required and "rope_scaling" not in config:
        keys["rope_scaling"] = None
    return keys


def _type(table: Mapping[str, Any]) -> Any:
    """Returns a table's rotary type, from its new or its old key."""
    return table.get("rope_type", table.get("type")) or "default"


def _by_layer(
    stated: Mapping[str, Any], config: Mapping[str, Any], reader: _Reader
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns the keys for sliding layers, and the remaining table for all other layers."""
    others = sorted(stated.keys() - {_FULL, _SLIDING})
    if others:
        raise reader.refuse(f"layers of type {others[0]}")
    full = stated.get(_FULL) or {}
    sliding = stated.get(_SLIDING) or {}
    name = reader.first(_SLIDING_THETA)
    if not sliding:
        return {}, full
    if name is not None and _type(sliding) == "default":
        return {**_pattern(config, reader), name: sliding.get("rope_theta")}, full
    # olmo3 scales its full layers alone, by one θ for all.
    whole = full or sliding
    same = sliding == whole or (reader.name == "olmo3" and _type(sliding) == "default")
    if name is not None or not same or sliding.get("rope_theta") != whole.get("rope_theta"):
        raise reader.refuse(f"different parameters for {_SLIDING} and {_FULL}")
    return {}, whole


def _pattern(config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """Returns the period n if every n-th layer uses full attention. transformers 5 lists the layer
    types instead.
    """
    name = "sliding_window_pattern"
    layers = config.get("layer_types")
    if name not in reader.keys or name in config or not layers:
        return {}
    for every in range(1, len(layers) + 2):
        if all((layer == _FULL) == (at % every == 0) for at, layer in enumerate(layers, 1)):
            return {name: every}
    raise reader.refuse(f"layer_types other than {_FULL} in every n-th layer")


def _scaling(
    kind: str, whole: Mapping[str, Any], config: Mapping[str, Any], reader: _Reader
) -> dict[str, Any]:
    """Returns rope_scaling with mlx-lm's keys. Some modules read rope_type, others type."""
    left_out = ("rope_theta", "partial_rotary_factor")
    kept = {key: value for key, value in whole.items() if key not in left_out and value is not None}
    scaling: dict[str, Any] = {**kept, "rope_type": kind, "type": kind}
    if kind in ("llama3", "yarn", "longrope"):
        scaling.setdefault(
            _ORIGINAL, config.get(_ORIGINAL) or config.get("max_position_embeddings")
        )
    if kind != "longrope":
        # whole numbers fail assertions in some modules
        scaling["factor"] = float(scaling["factor"])
    # transformers reads attention_factor, and reads yarn's two mscales only together. mlx-lm
    # reads no attention_factor, and reads each mscale without the other.
    mscales = [name for name in ("mscale", "mscale_all_dim") if scaling.get(name)]
    odd = ["attention_factor"] if kind in ("yarn", "longrope") else []
    for name in odd + (mscales if kind == "yarn" and len(mscales) == 1 else []):
        if scaling.get(name) is not None:
            raise reader.refuse(f"{name} with rope_type {kind}", scaling[name])
    if kind == "yarn" and not scaling.get("truncate", True):
        raise reader.refuse("truncate with rope_type yarn", scaling["truncate"])
    return scaling
