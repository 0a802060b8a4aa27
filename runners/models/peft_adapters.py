"""Converts adapters between PEFT's format and mlx-lm's. The update to a weight W [out, in] is scale
· (A B)ᵀ.

PEFT stores A [r, in], B [out, r] and scale = alpha / r (alpha / √r with rslora), and can override
rank and alpha by layer name. mlx-lm stores A [in, r], B [r, out] and a single rank and scale. Both
store DoRA's magnitudes per row of W, except that PEFT stores them per column for embeddings. A tied
output head has its own adapters in PEFT, but shares the embedding's adapters in mlx-lm. Format:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from runners.errors import UserError, listed, show
from runners.machine.bounded_process import BoundedFunction
from runners.models import json_keys

PEFT_ADAPTERS = "adapter_model.safetensors"
_BEFORE = "base_model.model."
# mlx-lm's suffix after a layer's name -> PEFT's
_OF_LAYER = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_OF_EMBEDDING = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_LEAVES = {  # and back
    **{theirs: ours for ours, theirs in (*_OF_LAYER.items(), *_OF_EMBEDDING.items())},
    "lora_magnitude_vector.weight": "m",
    "base_layer.weight": "base",
}
_EMBEDDING = "embed_tokens"
_HEAD = "lm_head"
# Where a vision-language model has its language part: in mlx-lm, in transformers.
_INNER = ("language_model.model.", "model.language_model.")


@attrs.frozen(eq=False)
class Adapters:
    """A folder's adapters in mlx-lm's format."""

    settings: dict[str, Any]  # adapter_config.json
    tensors: dict[str, mx.array]
    # layer -> the base weight under its adapters
    bases: Mapping[str, mx.array] = attrs.field(factory=dict)
    separate: bool = False  # embedding or head is changed, but not both together


def from_peft(
    settings: Mapping[str, Any], tensors: Mapping[str, mx.array], folder: Path
) -> Adapters:
    """Converts adapters from PEFT's adapter_config.json (checked by json_keys) and PEFT's tensors.

    Lower ranks are padded with zeros, which training does not change. Each layer's B is multiplied
    by the ratio between its scale and the first layer's scale. Raises UserError for kinds of
    adapters that mlx-lm does not support.
    """
    layers: dict[str, dict[str, mx.array]] = {}
    for name, leaf in tensors.items():
        found = re.fullmatch(
            rf"{re.escape(_BEFORE)}(.+?)\.({'|'.join(map(re.escape, _LEAVES))})", name
        )
        if found is None or leaf.ndim != (1 if "magnitude" in name else 2):
            raise UserError(
                f"{folder}: the tensor {show(name)} is not part of a LoRA or DoRA layer"
            )
        layers.setdefault(found[1], {})[_LEAVES[found[2]]] = leaf if leaf.ndim == 1 else leaf.T
    if not layers:
        raise UserError(f"{folder}: expected adapter tensors, found none")
    bases = {name: parts.pop("base").T for name, parts in layers.items() if "base" in parts}
    for name, parts in layers.items():
        if (
            not {"lora_a", "lora_b"} <= parts.keys()
            or parts["lora_a"].shape[1] != parts["lora_b"].shape[0]
        ):
            raise UserError(f"{folder}: {name}: expected lora_A and lora_B of the same rank")
        if "m" in parts and name.endswith(_EMBEDDING):
            raise UserError(
                f"{folder}: {name}: mlx-lm's DoRA of an embedding differs from PEFT's; expected "
                "LoRA"
            )
    embedding = next((name for name in layers if name.endswith(_EMBEDDING)), "")
    tied = bool(embedding) and _is_mirrored(layers[embedding], layers.get(_HEAD))
    if tied:
        del layers[_HEAD]
    ranks = {name: parts["lora_b"].shape[0] for name, parts in layers.items()}
    if not min(ranks.values()):
        raise UserError(f"{folder}: expected adapters with a rank of at least 1, found 0")
    scales = _scales(settings, ranks, folder)
    rank = max(ranks.values())
    scale = next(iter(scales.values()))
    sees = any(name.startswith(_INNER[1]) for name in layers)
    ours = {name: _in_mlx(name, sees) for name in layers}
    made: dict[str, mx.array] = {}
    for name, parts in layers.items():
        room = (0, rank - ranks[name])
        factor = scales[name] / scale
        b = parts["lora_b"] if factor == 1 else parts["lora_b"].astype(mx.float32) * factor
        parts |= {
            "lora_a": mx.pad(parts["lora_a"], [(0, 0), room]),
            "lora_b": mx.pad(b, [room, (0, 0)]),
        }
        made |= {f"{ours[name]}.{leaf}": array for leaf, array in parts.items()}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted(ours.values())}
    stated = {
        "fine_tune_type": "dora" if settings.get("use_dora") else "lora",
        "num_layers": -1,
        "lora_parameters": parameters,
        "model": settings.get("base_model_name_or_path") or "",
    }
    return Adapters(
        stated,
        made,
        {ours[name]: weight for name, weight in bases.items() if name in ours},
        separate=not tied and (bool(embedding) or _HEAD in layers),
    )


def to_peft(
    settings: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Returns the adapters as PEFT's adapter_config.json and tensors.

    Raises UserError for adapters that PEFT cannot represent.
    """
    rank, scale = (settings["lora_parameters"][name] for name in ("rank", "scale"))
    made: dict[str, mx.array] = {}
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    for name, leaf in tensors.items():
        layer, _, part = name.rpartition(".")
        if leaf.ndim > 2:
            raise UserError(f"{layer}: PEFT cannot represent adapters of experts")
        embeds = layer.endswith(_EMBEDDING)
        if embeds and part == "m":
            raise UserError(f"{layer}: PEFT cannot represent DoRA of an embedding; use LoRA")
        theirs = (_OF_EMBEDDING if embeds else _OF_LAYER).get(part)
        if theirs is None:
            raise UserError(f"{name}: expected a name that ends with {listed([*_OF_LAYER])}")
        made[f"{_BEFORE}{_in_peft(layer)}.{theirs}"] = leaf if leaf.ndim == 1 else leaf.T
    blocks = [re.search(r"\.layers\.(\d+)\.(.+)", layer) for layer in layers]
    first = {block[2] for block in blocks if block and block[1] == "0"}
    usual = all(block is None or block[2] in first for block in blocks) and bool(first)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.get("model") or None,
        "r": rank, "lora_alpha": scale * rank, "use_rslora": False,
        "use_dora": settings.get("fine_tune_type") == "dora",
        "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None,
        "ensure_weight_tying": any(layer.endswith(_EMBEDDING) for layer in layers),  # as in mlx-lm
        # Blocks count from the last one, so adapters in the first block imply adapters in all.
        "target_modules": sorted({x.rpartition(".")[2] if usual else _in_peft(x) for x in layers}),
    }  # fmt: skip
    return config, made


def _scales(
    settings: Mapping[str, Any], ranks: Mapping[str, int], folder: Path
) -> dict[str, float]:
    """Returns each layer's scale, alpha / r or alpha / √r. The first pattern that matches a layer's
    name sets alpha.
    """
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    alphas = dict.fromkeys(ranks, float(settings["lora_alpha"]))
    if patterns:  # regular expressions, which may take forever if untrusted
        found = _match([*patterns], [*ranks])
        if found is None:
            raise UserError(
                f"{folder}: alpha_pattern: expected regular expressions that can be matched with "
                f"the layers' names within 2 s, found {show([*patterns])}"
            )
        alphas |= {
            name: patterns[key] for name, key in zip(ranks, found, strict=True) if key is not None
        }
    power = 0.5 if settings.get("use_rslora") else 1
    return {name: alphas[name] / rank**power for name, rank in ranks.items()}


_match = BoundedFunction(f"{json_keys.__name__}:first_patterns", seconds=2.0, memory=256_000_000)


def _is_mirrored(embedding: Mapping[str, mx.array], head: Mapping[str, mx.array] | None) -> bool:
    """Returns whether a tied head uses its embedding's adapters (ensure_weight_tying)."""
    return (
        head is not None
        and bool(mx.array_equal(head["lora_a"], embedding["lora_b"].T))
        and bool(mx.array_equal(head["lora_b"], embedding["lora_a"].T))
    )


def _in_mlx(name: str, sees: bool) -> str:
    """Returns a layer's name in mlx-lm. `sees` marks a vision-language model."""
    return (
        f"language_model.{name}" if sees and name == _HEAD else name.replace(_INNER[1], _INNER[0])
    )


def _in_peft(layer: str) -> str:
    return _HEAD if layer.endswith(_HEAD) else layer.replace(*_INNER)
