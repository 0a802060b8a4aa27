"""Adapters in PEFT's format, from and to mlx-lm's: the update of a weight W [out, in] is scale · (A B)ᵀ.

PEFT has A [r, in], B [out, r] and scale = alpha / r (alpha / √r with rslora), each with exceptions by a
layer's name; mlx-lm has A [in, r], B [r, out] and one rank and scale for all. DoRA's length of each row is
the same in both. Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.errors import UserError, show

if TYPE_CHECKING:
    import mlx.core as mx

PEFT_ADAPTERS = "adapter_model.safetensors"
_BEFORE = "base_model.model."
_LEAVES = {  # PEFT's name behind a layer's -> mlx-lm's
    "lora_A.weight": "lora_a", "lora_B.weight": "lora_b",
    "lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "m", "lora_magnitude_vector.weight": "m",
}  # fmt: skip
# Where a vision-language model has its language part: in mlx-lm, in transformers.
_INNER = ("language_model.model.", "model.language_model.")


def from_peft(
    settings: Mapping[str, Any], tensors: Mapping[str, mx.array], folder: Path
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """adapter_config.json, by the rules of json_keys, and tensors in mlx-lm's form.

    Lower ranks are filled up with zeros, which training leaves as they are, and B takes up by what a layer's
    scale differs from the first one's. Raises UserError for kinds of adapters that mlx-lm does not have.
    """
    import mlx.core as mx

    layers: dict[str, dict[str, mx.array]] = {}
    for name, leaf in tensors.items():
        found = re.fullmatch(rf"{re.escape(_BEFORE)}(.+?)\.({'|'.join(map(re.escape, _LEAVES))})", name)
        if found is None or leaf.ndim != (1 if "magnitude" in name else 2):
            raise UserError(f"{folder}: the tensor {show(name)} is no part of a LoRA or DoRA layer")
        layer = found[1].replace(_INNER[1], _INNER[0])
        layers.setdefault(layer, {})[_LEAVES[found[2]]] = leaf if leaf.ndim == 1 else leaf.T
    if not layers:
        raise UserError(f"{folder}: expected tensors of adapters, found none")
    for name, parts in layers.items():
        if not {"lora_a", "lora_b"} <= parts.keys() or parts["lora_a"].shape[1] != parts["lora_b"].shape[0]:
            raise UserError(f"{folder}: {name}: expected lora_A and lora_B of one rank")
    ranks = {name: parts["lora_b"].shape[0] for name, parts in layers.items()}
    if not min(ranks.values()):
        raise UserError(f"{folder}: expected adapters of a rank from 1 on, found 0")
    alphas = _alphas(settings, folder)
    root = settings.get("use_rslora")
    scales = {name: _alpha(alphas, name) / (rank**0.5 if root else rank) for name, rank in ranks.items()}
    rank, scale = max(ranks.values()), next(iter(scales.values()))
    made: dict[str, mx.array] = {}
    for name, parts in layers.items():
        room, factor = (0, rank - ranks[name]), scales[name] / scale
        b = parts["lora_b"] if factor == 1 else parts["lora_b"].astype(mx.float32) * factor
        parts |= {"lora_a": mx.pad(parts["lora_a"], [(0, 0), room]), "lora_b": mx.pad(b, [room, (0, 0)])}
        made |= {f"{name}.{leaf}": array for leaf, array in parts.items()}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted(layers)}
    kind = "dora" if settings.get("use_dora") else "lora"
    stated = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters}
    return stated | {"model": settings.get("base_model_name_or_path") or ""}, made


def to_peft(
    settings: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """PEFT's adapter_config.json and tensors. Raises UserError for adapters of experts."""
    rank, scale = (settings["lora_parameters"][name] for name in ("rank", "scale"))
    dora = settings.get("fine_tune_type") == "dora"
    made: dict[str, mx.array] = {}
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    for name, leaf in tensors.items():
        layer, _, part = name.rpartition(".")
        if leaf.ndim > 2:
            raise UserError(f"{layer}: adapters of experts have no form in PEFT")
        embeds = layer.endswith("embed_tokens")
        theirs = [key for key, value in _LEAVES.items() if value == part and ("embedding" in key) == embeds]
        names = theirs or ["lora_magnitude_vector"]
        made[f"{_BEFORE}{layer.replace(*_INNER)}.{names[0]}"] = leaf if leaf.ndim == 1 else leaf.T
    blocks = [re.search(r"\.layers\.(\d+)\.(.+)", layer) for layer in layers]
    first = {block[2] for block in blocks if block and block[1] == "0"}
    usual = all(block is None or block[2] in first for block in blocks) and bool(first)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.get("model") or None,
        "r": rank, "lora_alpha": scale * rank, "use_dora": dora, "use_rslora": False, "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None,
        # Blocks count from the last one: who has the first block has them all.
        "target_modules": sorted({x.rpartition(".")[2] if usual else x.replace(*_INNER) for x in layers}),
    }  # fmt: skip
    return config, made


def _alphas(settings: Mapping[str, Any], folder: Path) -> dict[str, tuple[float, float]]:
    """alpha by the end of a layer's name, each with its place: the first that fits counts, the last fits all.

    PEFT's patterns are regular expressions; only names are read here, because those of a stranger may take
    forever.
    """
    found: dict[str, tuple[float, float]] = {}
    for place, (pattern, value) in enumerate((settings.get("alpha_pattern") or {}).items()):
        plain = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", plain):
            raise UserError(f"{folder}: alpha_pattern: expected names of layers, found {show(pattern)}")
        found.setdefault(plain.replace(_INNER[1], _INNER[0]), (place, value))
    return found | {"": (math.inf, settings["lora_alpha"])}


def _alpha(alphas: Mapping[str, tuple[float, float]], layer: str) -> float:
    parts = layer.split(".")
    ends = (".".join(parts[begin:]) for begin in range(len(parts) + 1))
    return min(alphas[end] for end in ends if end in alphas)[1]
