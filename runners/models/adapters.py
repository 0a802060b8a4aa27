"""Adds adapters to a module: new adapters, or adapters from a folder."""

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
WHOLE = 65_536  # values: a leaf of at most this size is read completely
SAMPLED = 16_384  # values read from a larger leaf, spread over all of it


def add_adapters(module: nn.Module, settings: ModelConfig, seed: int, digest: str = "") -> dict:
    """Freezes the module and adds the adapters that [model] configures: those in
    `settings.adapters`, or new ones.

    `digest` is the module's `base_digest`, or "" if unknown. Returns num_layers and
    lora_parameters, as in mlx-lm's adapter config. Raises the errors of `new_adapters` and
    `read_adapters`.
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
    """Freezes the module and adds new "lora" or "dora" adapters. `seed` determines the adapters'
    initial values.

    Returns num_layers and lora_parameters, as in mlx-lm's adapter config. Raises UserError if
    `lora` names layers that the module lacks.
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
    """Returns the names of the layers that can have adapters."""
    kinds = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
    return [
        name
        for name, part in root.named_modules()
        if isinstance(part, kinds) or hasattr(part, "to_lora")
    ]


def check_adapters(folder: Path) -> None:
    """Raises UserError unless a folder contains adapters. Only checks that need no model are
    made.
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
    """Returns the paths of an adapter folder's config and tensors: files with PEFT's names if
    present, otherwise those with mlx-lm's names.
    """
    config = folder / ADAPTER_CONFIG
    theirs = folder / PEFT_ADAPTERS
    peft = theirs.is_file() and config.is_file() and "peft_type" in read_json(config)
    return config, theirs if peft else folder / ADAPTERS


def read_folder(folder: Path) -> Adapters:
    """Returns a folder's adapters (mlx-lm's or PEFT's) in mlx-lm's format.

    Raises UserError if adapters are missing, or if their values are not floating-point or not
    finite.
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
    """Adds a folder's adapters to the module that was just read from `path`.

    `digest` is the module's `base_digest`. If `digest` is None, it is computed, but only for
    adapters that contain a digest (mlx-lm's contain none). Returns num_layers and lora_parameters,
    as in mlx-lm's adapter config. Raises UserError if the adapters are missing, incomplete, not
    finite, not of the kind `tune` (if given), or made for another model.
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
    """Raises UserError if a layer's weights differ from the base weights that PEFT saved with the
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
    """Returns the layers that have adapters, each merged and unpacked. The module is not
    changed.
    """
    named: Any = module.named_modules()
    return {name: layer.fuse(dequantize=True) for name, layer in named if "lora_a" in layer}


def base_of(folder: Path) -> str:
    """Returns the base model that an adapter folder names. Raises UserError if the folder names
    none.
    """
    settings = read_json(folder / ADAPTER_CONFIG)
    base = settings.get("base_model_name_or_path" if "peft_type" in settings else "model")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder}: these are adapters, but their {ADAPTER_CONFIG} does not name the base "
            f"model; expected the base model as MODEL, and --adapter {folder}"
        )
    return base


def base_digest(leaves: Mapping[str, mx.array]) -> str:
    """Returns a SHA-256 digest over the leaves' names, shapes and values, in hexadecimal.

    From a leaf with more than WHOLE values, only SAMPLED values are read, always at the same
    positions. A sample is enough, because nearly all values differ in another model or after more
    training. Floating-point values are read as float32, so the digest does not change if a model is
    saved with more bits. The digest is computed on the CPU, because a GPU would compile a kernel
    first.
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
