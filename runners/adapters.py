"""Adapters in a module: new ones to train, or those of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.prng import ADAPTERS, stream_key
from grpo_fn.trees import on_host
from runners.errors import UserError, did_you_mean, first_lines
from runners.inside import check_links
from runners.model_files import read_json
from runners.sections import LoraConfig
from runners.tensor_header import check_header


def new_adapters(module: nn.Module, tune: str, lora: LoraConfig, seed: int) -> dict:
    """Freezes the module and puts adapters ("lora" or "dora") into it; `seed` draws their first values.

    Returns mlx-lm's num_layers and lora_parameters. Raises UserError where `lora` names what is not there.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    keys = list(lora.keys)
    known = _adaptable(module)
    for key in keys:
        if key not in known:
            near = did_you_mean(key, known) or f"; this model has {', '.join(sorted(known))}"
            raise UserError(f'model.lora.keys: "{key}" is no linear or embedding layer of this model{near}')
    count = len(_layers(module))
    if lora.layers > count:
        raise UserError(f"model.lora.layers = {lora.layers}, but the model has {count} layers; -1 takes all")
    parameters: dict[str, Any] = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0}
    if keys:
        parameters["keys"] = keys
    high, low = on_host(stream_key(mx.random.key(seed), ADAPTERS))
    mx.random.seed(high << 32 | low)
    module.freeze()
    try:
        linear_to_lora_layers(module, lora.layers, parameters, use_dora=tune == "dora")
    except ValueError as error:
        raise UserError(f'model.tune = "{tune}": {error}') from error
    return {"num_layers": lora.layers, "lora_parameters": parameters}


def read_adapters(module: nn.Module, folder: Path, path: Path) -> None:
    """Puts a folder's adapters into the module of `path`; UserError where they are missing or do not fit."""
    from mlx_lm.tuner.utils import load_adapters

    check_links(folder)
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; wanted a folder of adapters as mlx-lm writes them")
    check_header(folder / "adapters.safetensors")
    read_json(folder / "adapter_config.json")
    try:
        load_adapters(module, str(folder))
    except Exception as error:  # of mlx-lm, for a config that anyone may have written
        raise UserError(f"{folder}: the adapters do not fit {path}: {first_lines(str(error))}") from error


def base_of(folder: Path) -> str:
    """The base model that a folder of adapters names; UserError where it names none."""
    base = read_json(folder / "adapter_config.json").get("model")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder}: these are adapters, and their adapter_config.json does not name the base model; "
            f"wanted the base model as MODEL, and --adapter {folder}"
        )
    return base


def _layers(module: nn.Module) -> list[nn.Module]:
    return cast("list[nn.Module]", module.layers)


def _adaptable(module: nn.Module) -> set[str]:
    """Names that `lora.keys` may hold: relative to a layer, or from the root for the parts outside."""
    kinds = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)

    def names(root: nn.Module) -> set[str]:
        return {
            name for name, part in root.named_modules() if isinstance(part, kinds) or hasattr(part, "to_lora")
        }

    inside = {name for layer in _layers(module) for name in names(layer)}
    outside = {name for name in names(module) if ".layers." not in f".{name}"}
    return inside | outside
