"""The keys of a config.json in the spelling of mlx-lm's modules, the rotary embedding's above all.

transformers 5 writes one table, `rope_parameters`, which holds θ, the share of a head that is rotated, and
the scaling, for the whole model or for each type of layer. Most of mlx-lm's modules read `rope_theta`,
`rope_scaling`, `partial_rotary_factor` and the like instead, and use defaults if these are missing. Some
other keys have two names in transformers (`attribute_map`), of which it writes one.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Collection, Mapping
from typing import Any

from runners.errors import UserError, error_line, show

# The types that mlx-lm's `initialize_rope` computes like transformers.
SCALED = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})
PLAIN = frozenset({"default"})
# Modules that have the key rope_scaling, but support less than mlx-lm's `initialize_rope`.
_COMPUTED = {
    **dict.fromkeys(
        ("gemma3n", "glm4_moe", "kimi_linear", "mixtral", "qwen2_moe", "qwen3_moe", "solar_open"), PLAIN
    ),
    **dict.fromkeys(("deepseek", "nemotron"), PLAIN | {"linear"}),
    **dict.fromkeys(("internlm2", "internlm3"), PLAIN | {"linear", "dynamic"}),
    **dict.fromkeys(("phi3", "phimoe"), PLAIN | {"longrope"}),
    "deepseek_v2": frozenset({"yarn"}),
    "deepseek_v41": frozenset(),  # two kinds of layers, with separate keys
    "hunyuan": frozenset({"dynamic"}),
    "hunyuan_v1_dense": PLAIN | {"dynamic"},
    "minicpm3": frozenset({"longrope"}),
    # These rotate neighbouring dimensions together; mlx-lm's longrope does not.
    **dict.fromkeys(
        {"bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_vl", "llama4"}
        | {"longcat_flash", "longcat_flash_ngram", "youtu_llm"},
        SCALED - {"longrope"},
    ),
}
# Modules that read all of rope_parameters themselves.
_READ_IT = {
    *("gemma4_text", "glm_moe_dsa", "laguna", "mellum", "minimax_m3_vl", "ministral3", "mistral4"),
    *("muse_spark", "qwen3_5", "spark2_5"),
}
# The reader of the keys for models with a text_config: "module" or "module:class".
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
# Modules that read no key for a value and use this constant.
_BUILT_IN = {"recurrent_gemma": {"rope_theta": 10000, "partial_rotary_factor": 0.5}}
_SCALES_FULL_LAYERS = ("olmo3",)  # and no others, though θ is one for all
_OUTSIDE = ("phi3", "phimoe")  # read original_max_position_embeddings outside the table
_THETA = ("rope_theta", "rotary_emb_base")
_SLIDING_THETA = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONG = ("longrope", "su")
_ORIGINAL = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class _Reader:
    name: str  # of mlx-lm's module
    keys: Collection[str]  # that it reads
    required: Collection[str]  # keys without a default

    def first(self, names: Collection[str]) -> str | None:
        """The one of these keys that is read, or None."""
        return next((name for name in names if name in self.keys), None)

    def refuse(self, what: str) -> UserError:
        """The error for something that the module does not compute."""
        return UserError(f"rope_parameters: mlx-lm's {self.name} does not compute {what}")


def with_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the keys that mlx-lm's module reads, in addition to those of transformers 5.

    Both transformers and mlx-lm read the result correctly. The config is unchanged if it has neither
    `rope_parameters` nor a key by another name, or if mlx-lm's module reads these itself or does not exist.
    A `rope_scaling` that is there stays, as both of them prefer it.

    Raises UserError, with the key, if mlx-lm's module would compute something else.
    """
    nested, reader = _reader(config)
    part = config["text_config"] if nested else config
    if reader is None:
        return config
    try:
        keys = _other_names(part, reader) | (_keys(part, reader) if part.get("rope_parameters") else {})
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(f"rope_parameters: not as transformers writes them: {error_line(error)}") from error
    if not keys:
        return config
    return {**config, "text_config": {**part, **keys}} if nested else {**config, **keys}


def _other_names(config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """Required keys that transformers writes under another name: `num_local_experts` of qwen3_moe."""
    missing = [name for name in reader.required if name not in config]
    if not missing:
        return {}
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    names = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return {name: config[names[name]] for name in missing if names.get(name) in config}


def rope_notices(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Lines on differences between mlx-lm and transformers for this config, in either spelling."""
    for part in (config, config.get("text_config")):
        scaling = part.get("rope_scaling") if isinstance(part, Mapping) else None
        if not isinstance(scaling, Mapping) or scaling.get("short_factor") == scaling.get("long_factor"):
            continue
        if scaling.get("type") in _LONG or scaling.get("rope_type") in _LONG:
            return (
                "rope_scaling: mlx-lm uses long_factor for texts of every length, transformers uses "
                "short_factor for short ones, so log-probs of short texts differ from transformers'",
            )
    return ()


def _reader(config: Mapping[str, Any]) -> tuple[bool, _Reader | None]:
    """Whether the keys are in text_config, and their reader; None: the keys are left alone."""
    if "model_file" in config or not isinstance(config.get("model_type"), str):
        return False, None
    from mlx_lm.utils import _get_classes

    try:
        module, kind = _get_classes(dict(config))[1].__module__.rpartition(".")[2], ""
    except (ValueError, AttributeError, TypeError):  # no such architecture: loading it says so
        return False, None
    text = config.get("text_config")
    nested = isinstance(text, dict)
    if module in _TEXT:
        if module == "mistral3" and nested and text.get("model_type") in ("ministral3", "mistral4"):
            return nested, None
        module, _, kind = _TEXT[module].partition(":")
    elif nested:
        return nested, None
    if module in _READ_IT:
        return nested, None
    arguments = getattr(importlib.import_module(f"mlx_lm.models.{module}"), kind or "ModelArgs")
    fields = dataclasses.fields(arguments)
    missing = dataclasses.MISSING
    required = {field.name for field in fields if field.default is missing is field.default_factory}
    return nested, _Reader(module, {field.name for field in fields}, required)


def _keys(config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """The keys to add to a config that has rope_parameters."""
    whole = config["rope_parameters"]
    keys: dict[str, Any] = {}
    if any(isinstance(value, Mapping) for value in whole.values()):
        keys, whole = _by_layer(whole, config, reader)
    keys |= _theta(whole, reader) | _partial(whole, config, reader)
    kind = _type(whole)
    if kind not in _COMPUTED.get(reader.name, SCALED if "rope_scaling" in reader.keys else PLAIN):
        raise reader.refuse(f"rope_type = {show(kind)}")
    if kind != "default" and not config.get("rope_scaling"):
        keys["rope_scaling"] = _scaling(kind, whole, config, reader)
        if reader.name in _OUTSIDE:
            keys[_ORIGINAL] = keys["rope_scaling"][_ORIGINAL]
    elif "rope_scaling" in reader.required and "rope_scaling" not in config:
        keys["rope_scaling"] = None
    return keys


def _type(table: Mapping[str, Any]) -> Any:
    """The type of a table, by its new name or its old one."""
    return table.get("rope_type", table.get("type")) or "default"


def _by_layer(
    stated: Mapping[str, Any], config: Mapping[str, Any], reader: _Reader
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The keys of sliding layers, and the remaining table for all others."""
    if others := sorted(stated.keys() - {_FULL, _SLIDING}):
        raise reader.refuse(f"layers of type {others[0]}")
    full, sliding = stated.get(_FULL) or {}, stated.get(_SLIDING) or {}
    if not sliding:
        return {}, full
    name = reader.first(_SLIDING_THETA)
    if name is None:
        whole = full or sliding
        apart = _type(sliding) != "default" if reader.name in _SCALES_FULL_LAYERS else sliding != whole
        if sliding.get("rope_theta") != whole.get("rope_theta") or apart:
            raise reader.refuse(f"other parameters for {_SLIDING} than for {_FULL}")
        return {}, whole
    if _type(sliding) != "default":
        raise reader.refuse(f"rope_type = {show(_type(sliding))} for {_SLIDING}")
    theta = sliding.get("rope_theta")
    return _pattern(config, reader) | ({} if theta is None else {name: theta}), full


def _pattern(config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """The period n if every n-th layer is a full one; transformers 5 lists the layers' types instead."""
    name, layers = "sliding_window_pattern", config.get("layer_types")
    if name not in reader.keys or name in config or not layers:
        return {}
    hint = config.get(f"_{name}")
    for every in (*([hint] if hint else []), *range(1, len(layers) + 2)):
        if all((layer == _FULL) == (at % every == 0) for at, layer in enumerate(layers, 1)):
            return {name: every}
    raise UserError(
        f"layer_types: mlx-lm's {reader.name} has {_FULL} in every n-th layer alone, found {show(layers)}"
    )


def _theta(whole: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """θ under the name that the module uses."""
    theta = whole.get("rope_theta")
    if theta is None:
        return {}
    name = reader.first(_THETA)
    if name is None or theta != _BUILT_IN.get(reader.name, whole).get("rope_theta"):
        raise reader.refuse(f"rope_theta = {show(theta)}")
    return {name: theta}


def _partial(whole: Mapping[str, Any], config: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """The rotated share of each head, under the name that the module uses."""
    share = whole.get("partial_rotary_factor")
    if share is None:
        return {}
    name = reader.first(("partial_rotary_factor", "rotary_pct"))
    if name is not None:
        return {name: share}
    if "rotary_dim" in reader.keys:
        return {"rotary_dim": int(config["head_dim"] * share)}
    if share != _BUILT_IN.get(reader.name, {}).get("partial_rotary_factor", 1):
        raise reader.refuse(f"partial_rotary_factor = {show(share)}")
    return {}


def _scaling(
    kind: str, whole: Mapping[str, Any], config: Mapping[str, Any], reader: _Reader
) -> dict[str, Any]:
    """rope_scaling in mlx-lm's spelling. Some modules read rope_type, some type."""
    left_out = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    kept = {key: value for key, value in whole.items() if key not in left_out and value is not None}
    scaling: dict[str, Any] = {"rope_type": kind, "type": kind, **kept}
    longest = config.get("max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):
        scaling[_ORIGINAL] = config.get(_ORIGINAL) or scaling.get(_ORIGINAL, longest)
    if "factor" in scaling:
        scaling["factor"] = float(scaling["factor"])  # whole numbers fail assertions in some modules
    elif kind == "yarn":
        scaling["factor"] = longest / scaling[_ORIGINAL]
    elif kind != "longrope":
        raise UserError(f"rope_parameters: rope_type = {show(kind)} without factor")
    if kind == "yarn":
        scaling |= _yarn(scaling, reader)
    if kind == "longrope":
        _check_longrope(scaling, longest / scaling[_ORIGINAL], reader)
    return scaling


def _yarn(scaling: Mapping[str, Any], reader: _Reader) -> dict[str, Any]:
    """The mscale that gives mlx-lm the same factor on attention as transformers.

    With f(m) = 0.1·m·ln(factor) + 1, mlx-lm computes f(mscale or 1) / f(mscale_all_dim or 0). transformers
    takes attention_factor, or f(mscale) / f(mscale_all_dim) where both are given, or f(1).
    """
    if scaling.get("truncate", True) is not True:
        raise reader.refuse(f"truncate = {show(scaling['truncate'])}")
    stated, other = scaling.get("mscale", 0), scaling.get("mscale_all_dim", 0)
    slope = 0.1 * math.log(max(scaling["factor"], 1))

    def magnitude(mscale: float) -> float:
        return slope * mscale + 1

    usual = magnitude(stated) / magnitude(other) if stated and other else magnitude(1)
    wanted = scaling.get("attention_factor", usual)
    # An explicit mscale of 0 means 0 in mlx-lm.
    if math.isclose(wanted, magnitude(scaling.get("mscale", 1)) / magnitude(other)):
        return {}
    if not slope:
        raise reader.refuse(f"attention_factor = {show(wanted)} with a factor of 1")
    return {"mscale": (wanted * magnitude(other) - 1) / slope}


def _check_longrope(scaling: Mapping[str, Any], growth: float, reader: _Reader) -> None:
    """mlx-lm takes the factor on attention from the two lengths, or from long_mscale."""
    if scaling.get("long_mscale"):
        return

    def magnitude(factor: float) -> float:
        length = scaling[_ORIGINAL]
        return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 < length else 1.0

    computed = magnitude(growth)
    wanted = scaling.get("attention_factor", magnitude(scaling.get("factor", growth)))
    if not math.isclose(wanted, computed, rel_tol=1e-6):
        raise reader.refuse(f"a factor of {wanted:.4g} on attention (it computes {computed:.4g})")
