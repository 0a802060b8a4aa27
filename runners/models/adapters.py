"""Adds adapters to a module: new ones, or those in a folder."""

import hashlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from grpo_fn import prng
from grpo_fn.trees import named_leaves, on_host
from runners.config.sections import LoraConfig, ModelConfig
from runners.errors import UserError, did_you_mean, first_lines, show, user_errors
from runners.files.json_files import read_json
from runners.files.tensor_files import check_header, load_arrays
from runners.models import json_keys
from runners.models.folders import final_of
from runners.models.model_reader import check_finite, is_floating
from runners.models.peft_adapters import PEFT_ADAPTERS, Adapters, from_peft

ADAPTERS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE_DIGEST = "base_digest"  # our key in adapter_config.json; mlx-lm ignores it
WHOLE = 65_536  # numbers: a leaf of at most this size is read whole
SAMPLED = 16_384  # numbers of a larger leaf, spread over all of it


def add_adapters(module: nn.Module, settings: ModelConfig, seed: int, digest: str = "") -> dict:
    """Freezes the module and adds [model]'s adapters to it, either from `settings.adapters` or new
    ones.

    `digest` is the `base_digest` of the module; "" if unknown. Returns mlx-lm's num_layers and
    lora_parameters. Raises the errors of `new_adapters` and `read_adapters`.
    """
    if not settings.adapters:
        return new_adapters(module, settings.tune, settings.lora, seed)
    module.freeze()
    return read_adapters(
        module,
        Path(settings.adapters).expanduser(),
        settings.path,
        digest,
        tune=settings.tune,
    )


def new_adapters(module: nn.Module, tune: str, lora: LoraConfig, seed: int) -> dict:
    """Freezes the module and adds adapters ("lora" or "dora") to it; `seed` determines their
    initial values.

    Returns mlx-lm's num_layers and lora_parameters. Raises UserError if `lora` names missing
    layers.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    # Relative to a layer, or from the root for parts outside the layers.
    known = {name for name in _adaptable(module) if ".layers." not in f".{name}"}
    known |= {*chain.from_iterable(map(_adaptable, cast("list[nn.Module]", module.layers)))}
    unknown = next((key for key in lora.keys if key not in known), None)
    if unknown is not None:
        near = did_you_mean(unknown, known) or f"; this model has {', '.join(sorted(known))}"
        raise UserError(
            f'model.lora.keys: "{unknown}" is not a linear or embedding layer of this model{near}'
        )
    parameters: dict[str, Any] = {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0}
    if lora.keys:
        parameters["keys"] = list(lora.keys)
    with mx.stream(mx.cpu):  # the forecast needs no GPU, which takes seconds to start
        high, low = on_host(prng.fold_in(mx.random.key(seed), prng.ADAPTERS))
    mx.random.seed(high << 32 | low)
    module.freeze()
    with user_errors(f'model.tune = "{tune}"', ValueError):
        linear_to_lora_layers(module, lora.layers, parameters, use_dora=tune == "dora")
    return {"num_layers": lora.layers, "lora_parameters": parameters}


def _adaptable(root: nn.Module) -> list[str]:
    """The names of the layers that can have adapters."""
    kinds = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
    return [
        name
        for name, part in root.named_modules()
        if isinstance(part, kinds) or hasattr(part, "to_lora")
    ]


def check_adapters(folder: Path) -> None:
    """Raises UserError unless a folder contains adapters. Checks only what does not require their
    model.
    """
    config, weights = adapter_files(folder)
    missing = next((file.name for file in (config, weights) if not file.is_file()), None)
    if missing:
        raise UserError(
            f"{folder}: {missing} is missing; expected a folder of adapters from mlx-lm or "
            f"PEFT{final_of(folder)}"
        )
    check_header(weights)
    json_keys.check_keys(
        read_json(config),
        config,
        json_keys.ADAPTERS if weights.name == ADAPTERS else json_keys.PEFT,
    )


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Config and tensors of a folder of adapters, from files with mlx-lm's names or, if present,
    PEFT's.
    """
    config = folder / ADAPTER_CONFIG
    theirs = folder / PEFT_ADAPTERS
    peft = theirs.is_file() and config.is_file() and "peft_type" in read_json(config)
    return config, theirs if peft else folder / ADAPTERS


def read_folder(folder: Path) -> Adapters:
    """A folder's adapters (mlx-lm's or PEFT's) in mlx-lm's format.

    Raises UserError if they are missing, not floating or not finite.
    """
    check_adapters(folder)
    config, file = adapter_files(folder)
    tensors, _ = load_arrays(file)
    for name, leaf in tensors.items():
        if not is_floating(leaf):
            raise UserError(
                f"{file}: the tensor {show(name)}: expected floating numbers, found {leaf.dtype}"
            )
    check_finite(tensors, file)
    settings = read_json(config)
    if file.name == ADAPTERS:
        return Adapters(settings, tensors)
    return from_peft(settings, tensors, folder)


def read_adapters(
    module: nn.Module, folder: Path, path: Path | str, digest: str | None = None, tune: str = ""
) -> dict[str, Any]:
    """Adds a folder's adapters to the newly read module of `path`.

    `digest` is the `base_digest` of the module. If it is None, it is computed if the adapters
    contain a digest (mlx-lm's do not). Returns mlx-lm's num_layers and lora_parameters. Raises
    UserError if the adapters are missing, incomplete, not finite, of another kind than `tune` (if
    given), or made for another model.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    adapters = read_folder(folder)
    stated = adapters.settings
    tensors = adapters.tensors
    kind = stated.get("fine_tune_type") or "lora"
    if tune and tune != kind:
        raise UserError(
            f'model.adapters: {folder} contains adapters of fine_tune_type "{kind}"; expected '
            f'model.tune = "{kind}", found "{tune}"'
        )
    if digest is None:
        digest = base_digest(named_leaves(module.parameters())) if BASE_DIGEST in stated else ""
    where = f"{folder}: the adapters do not fit {path}"
    if adapters.separate and not any(
        name.endswith("lm_head") for name, _ in module.named_modules()
    ):
        raise UserError(
            f"{where}: the model's head and its token embedding share their weights, but the "
            f"adapters change the two separately; expected PEFT's ensure_weight_tying = true"
        )
    count = stated["num_layers"]
    parameters = {**stated["lora_parameters"], "dropout": 0.0}  # the learner has none
    # mlx-lm may fail in any way for an untrusted config
    with user_errors(where, Exception, why=first_lines):
        linear_to_lora_layers(module, count, parameters, use_dora=kind == "dora")
    wanted = {
        name: list(leaf.shape)
        for name, leaf in named_leaves(module.parameters()).items()
        if name.rpartition(".")[2] in ("lora_a", "lora_b", "m")
    }
    found = {name: list(leaf.shape) for name, leaf in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise UserError(
                f"{where}: {show(name)}: expected the shape {wanted.get(name, 'nothing')}, found "
                f"{found.get(name, 'nothing')}"
            )
    _check_bases(module, adapters, where)
    if digest and stated.get(BASE_DIGEST) not in (None, digest):
        raise UserError(
            f"{folder}: the adapters were made for weights that differ from those of {path}; their "
            f"base model is {stated.get('model')} (if {BASE_DIGEST} is removed from "
            f"{ADAPTER_CONFIG}, any model with these shapes accepts them)"
        )
    module.load_weights(list(tensors.items()), strict=False)
    return {"num_layers": count, "lora_parameters": parameters}


def _check_bases(module: nn.Module, adapters: Adapters, where: str) -> None:
    """Raises UserError for layers whose weights differ from the ones that PEFT saved with their
    adapters.
    """
    layers: dict[str, Any] = dict(module.named_modules())
    for name, weight in adapters.bases.items():
        base = layers[name].linear if "linear" in layers[name] else layers[name].embedding
        if hasattr(base, "bits"):  # rounded
            continue
        coarse = max(base.weight.dtype, weight.dtype, key=lambda dtype: mx.finfo(dtype).eps)
        if not mx.array_equal(base.weight.astype(coarse), weight.astype(coarse)):
            raise UserError(
                f"{where}: {name} has weights that differ from the adapters' base_layer"
            )


def fused_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers with adapters, each merged and unpacked; the module is not changed."""
    named: Any = module.named_modules()
    return {name: layer.fuse(dequantize=True) for name, layer in named if "lora_a" in layer}


def base_of(folder: Path) -> str:
    """The base model that a folder of adapters names. Raises UserError if it names none."""
    settings = read_json(folder / ADAPTER_CONFIG)
    base = settings.get("base_model_name_or_path" if "peft_type" in settings else "model")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder}: these are adapters, but their {ADAPTER_CONFIG} does not name the base "
            f"model; expected the base model as MODEL, and --adapter {folder}"
        )
    return base


def base_digest(leaves: Mapping[str, mx.array]) -> str:
    """A SHA-256 digest of the leaves' names, shapes and numbers, in hexadecimal.

    From a leaf with more than WHOLE numbers, only SAMPLED numbers are read, always at the same
    positions, because nearly all numbers differ in another model or after more training.
    Floating-point numbers are read as float32, so the digest does not change if a model is saved
    with more bits. The digest is computed on the CPU, because a GPU would compile a kernel first.
    """
    digest = hashlib.sha256()
    with mx.stream(mx.cpu):
        for name, leaf in sorted(leaves.items()):
            digest.update(f"{name} {leaf.shape}\n".encode())
            digest.update(np.array(_sample(leaf)).tobytes())
    return digest.hexdigest()


def _sample(leaf: mx.array) -> mx.array:
    flat = leaf.reshape(-1)
    if flat.size > WHOLE:
        # Multiples of an odd number modulo the size do not meet the same columns of a matrix.
        steps = np.arange(SAMPLED, dtype=np.uint64) * np.uint64(2_654_435_761)
        flat = flat[mx.array((steps % np.uint64(flat.size)).astype(np.uint32))]
    return mx.contiguous(flat.astype(mx.float32) if is_floating(flat) else flat)
