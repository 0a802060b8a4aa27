"""Lists GGUF's names for the parts and sizes of mlx-lm's models: one table per fact, used in both
directions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from runners.errors import UserError, listed, show

_PARTS = {  # parts of a block: mlx-lm's name -> GGUF's
    "input_layernorm": "attn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("q", "k", "v", "qkv")},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@attrs.frozen
class Family:
    """GGUF's representation of a model family."""

    arch: str  # GGUF's name
    model_type: str  # written to config.json when a folder is made from GGUF
    parts: Mapping[str, str] = attrs.field(factory=lambda: _PARTS)
    pairs: bool = False  # rotated pairs are adjacent in q and k, not half a head apart
    norm_offset: float = 0.0  # added to the norms' weights
    # with this many blocks, llama.cpp scales queries by hidden_size / heads, not by the head
    wide: int = 0
    windows: Sequence[str] = ()  # which of _WINDOWS llama.cpp reads

    def names(self, blocks: int) -> dict[str, str]:
        """Returns GGUF's name for each of mlx-lm's layers, in a model with this many blocks."""
        names = dict(_OUTSIDE)
        for block in range(blocks):
            for ours, theirs in self.parts.items():
                names[f"model.layers.{block}.{ours}"] = f"blk.{block}.{theirs}"
        return names

    def rotated_heads(self, name: str, config: Mapping[str, Any]) -> int:
        """Returns the number of heads in a GGUF tensor whose rotated pairs are reordered, or 0."""
        part = name.split(".")[-2]
        if not self.pairs or part not in ("attn_q", "attn_k"):
            return 0
        return config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]


_LLAMA = Family("llama", "llama", pairs=True)
_WINDOWS = ("sliding_window", "sliding_window_pattern", "rope_local_base_freq")
_GEMMA3 = Family("gemma3", "gemma3_text", _PARTS | _GEMMA, norm_offset=1, wide=62, windows=_WINDOWS)
_GEMMA2 = Family(
    "gemma2", "gemma2", _PARTS | _GEMMA, norm_offset=1, wide=46, windows=("sliding_window",)
)
_PHI3 = {name: part for name, part in _PARTS.items() if not part.endswith(("_gate", "_up"))}
FAMILIES = {  # by model_type
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Family("qwen2", "qwen2"),
    "qwen3": Family("qwen3", "qwen3"),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family("phi3", "phi3", _PHI3 | {"mlp.gate_up_proj": "ffn_up"}),
}

_KEYS = {  # config.json's -> GGUF's after the architecture's name; whether every file has it
    "max_position_embeddings": ("context_length", int, True),
    "hidden_size": ("embedding_length", int, True),
    "intermediate_size": ("feed_forward_length", int, True),
    "num_hidden_layers": ("block_count", int, True),
    "num_attention_heads": ("attention.head_count", int, True),
    "num_key_value_heads": ("attention.head_count_kv", int, False),
    "head_dim": ("attention.key_length", int, False),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float, True),
    "rope_theta": ("rope.freq_base", float, False),
    "rope_local_base_freq": ("rope.freq_base_swa", float, False),
    "original_max_position_embeddings": ("rope.scaling.original_context_length", int, False),
    "sliding_window": ("attention.sliding_window", int, False),
    "sliding_window_pattern": ("attention.sliding_window_pattern", int, False),
    "attn_logit_softcapping": ("attn_logit_softcapping", float, False),
    "final_logit_softcapping": ("final_logit_softcapping", float, False),
    "vocab_size": ("vocab_size", int, False),
}
_DEFAULTS = {  # by architecture: shared defaults for keys that files omit
    "gemma2": {"rope_theta": 10000.0},
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
}


def _query_size(family: Family, config: Mapping[str, Any]) -> int:
    """Returns the square of the number by which llama.cpp divides query-key products."""
    wide = config["num_hidden_layers"] == family.wide
    return config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]


def metadata_of(
    family: Family, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns GGUF's metadata for a config.json whose defaults are filled in, and the rotation's
    tensors.

    Raises UserError for models that llama.cpp computes differently.
    """
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config = {**config, "head_dim": head}
    size = _query_size(family, config)
    if family.wide and config["query_pre_attn_scalar"] != size:
        raise UserError(
            f"query_pre_attn_scalar: expected llama.cpp's {size}, found "
            f"{config['query_pre_attn_scalar']}"
        )
    unread = {*_WINDOWS} - {*family.windows}
    values = {
        key: kind(config[name])
        for name, (key, kind, _) in _KEYS.items()
        if config.get(name) is not None and name not in unread
    }
    values |= {
        "attention.value_length": head,
        "rope.dimension_count": int(head * config.get("partial_rotary_factor", 1.0)),
    }
    if family.arch == "phi3":
        values["attention.sliding_window"] = 0
    scaling = dict(config.get("rope_scaling") or {})
    tensors = {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "llama3":
        tensors[ROPE_FACTORS[0]] = _llama3_factors(config, scaling)
    elif kind in ("longrope", "su"):
        old = config["original_max_position_embeddings"]
        ratio = max(config["max_position_embeddings"] / old, 1.0)
        values["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(ratio) / np.log(old)))
        for name, key in zip(ROPE_FACTORS[1:], ("long_factor", "short_factor"), strict=True):
            tensors[name] = np.array(scaling[key], np.float32)
    elif kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
        if kind == "yarn":
            old = scaling["original_max_position_embeddings"]
            values["rope.scaling.original_context_length"] = int(old)
    elif kind != "default":
        raise UserError(
            f"rope_scaling: expected default, linear, llama3, longrope or yarn, found {show(kind)}"
        )
    return {f"{family.arch}.{key}": value for key, value in values.items()}, tensors


def config_of(
    arch: str, metadata: Any, has_head: bool, factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Returns the config.json for a GGUF header. `metadata` is the header's method `get`, and
    `factors` are the rotation's tensors.

    Raises UserError for an unknown architecture and for missing sizes.
    """
    family = next((family for family in FAMILIES.values() if family.arch == arch), None)
    if family is None:
        known = listed(sorted({family.arch for family in FAMILIES.values()}))
        raise UserError(f"general.architecture: expected {known}, found {show(arch)}")
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
    }
    for name, (key, kind, needed) in _KEYS.items():
        default = ... if needed else _DEFAULTS.get(arch, {}).get(name)
        found = metadata(f"{arch}.{key}", kind, default)
        if found is None:
            continue
        if not np.isfinite(found):
            raise UserError(f"{arch}.{key}: expected a finite number, found {found}")
        if kind is int and not 0 <= found < 2**31:
            raise UserError(f"{arch}.{key}: expected a 31-bit number, found {found}")
        config[name] = found if kind is int else float(str(np.float32(found)))
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    if min(heads, config["num_key_value_heads"], config["hidden_size"]) < 1:
        raise UserError("expected at least one head and a width of at least 1")
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config["tie_word_embeddings"] = not has_head
    if family.wide:
        config["query_pre_attn_scalar"] = _query_size(family, config)
    turned = metadata(f"{arch}.rope.dimension_count", int, config["head_dim"])
    if turned != config["head_dim"]:
        config["partial_rotary_factor"] = turned / config["head_dim"]
    if arch == "phi3":
        config.pop("sliding_window", None)
        config.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    scaling = _scaling(arch, metadata, config, factors)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _scaling(
    arch: str, metadata: Any, config: Mapping[str, Any], factors: Mapping[str, np.ndarray]
) -> dict[str, Any] | None:
    kind = metadata(f"{arch}.rope.scaling.type", str, "none")
    # Llama 3's factors are computed from values that the file does not contain.
    found = factors.get(ROPE_FACTORS[0])
    if found is not None:
        scaling = {"rope_type": "llama3", "factor": float(found.max()), "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
        if not np.allclose(_llama3_factors(config, scaling), found, rtol=1e-4):
            raise UserError(
                f"{ROPE_FACTORS[0]}: expected the factors of Llama 3, found different ones"
            )
        return scaling
    if ROPE_FACTORS[1] in factors:
        return {
            "type": "longrope",
            "long_factor": [float(str(x)) for x in factors[ROPE_FACTORS[1]]],
            "short_factor": [float(str(x)) for x in factors[ROPE_FACTORS[2]]],
        }
    if kind == "none":
        return None
    scaling = {
        "type": kind,
        "rope_type": kind,
        "factor": metadata(f"{arch}.rope.scaling.factor", float),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata(
            f"{arch}.rope.scaling.original_context_length", int
        )
    elif kind != "linear":
        raise UserError(f"rope.scaling.type: expected none, linear or yarn, found {show(kind)}")
    return scaling


def _llama3_factors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> np.ndarray:
    """Returns the factors by which Llama 3 reduces each frequency, [head_dim / 2] (transformers'
    `llama3` rotation).

    Wavelengths below old context / high_freq_factor are unchanged, and those above old context /
    low_freq_factor are multiplied by `factor`. In between, the frequency is interpolated linearly
    in the number of waves per old context.
    """
    size = config["head_dim"]
    old = scaling["original_max_position_embeddings"]
    waves = old / (2 * np.pi * config["rope_theta"] ** (np.arange(0, size, 2) / size))
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((waves - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)


def swap_pairs(rows: Any, heads: int, *, apart: bool) -> Any:
    """Reorders q's or k's rows [heads · D, …] so that each head's rotated pairs are half a head
    `apart` or, otherwise, adjacent.
    """
    inner = (-1, 2) if apart else (2, -1)
    return rows.reshape(heads, *inner, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
