"""The size of a model without its weights: the module is built, but nothing in it is computed.

MLX's arrays are lazy: a new module, or one loaded with `lazy=True`, has shapes and dtypes but uses no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.learner import can_share
from grpo_fn.policy import (
    QuantMode,
    decode_weights_bytes,
    patch_layers,
    quant_mode,
    quantizable,
    quantize,
    shares_prefix,
    sharing_pays,
)
from grpo_fn.trees import split_leaves
from runners.config.loading import Config
from runners.config.sections import SHIPPED, ModelConfig
from runners.errors import UserError, first_lines
from runners.files.hub import hub_errors, hub_or_cache
from runners.images.tower import tower_bytes
from runners.machine.startup import Platform
from runners.memory.footprint import WeightSizes
from runners.memory.passes import ModelShape, model_shape
from runners.models.adapters import new_adapters
from runners.models.dtypes import choose_dtype
from runners.models.folders import read_config, resolve_model
from runners.models.model_reader import custom_loader, load_module


@attrs.frozen
class ModelSizes:
    """A model as a config uses it."""

    shape: ModelShape
    weights: WeightSizes
    shares_prompts: bool  # whether a group's prompt can be computed once in the learner
    shares_prefix: bool  # whether the prompt is kept once while its completions are decoded


def model_sizes(config: Config, platform: Platform, *, stated: dict[str, Any] | None = None) -> ModelSizes:
    """The sizes of the model that [model] names, in the roles that the config gives it.

    A local folder is measured by the headers of its weight files. For a model on the Hub only config.json is
    read; its weights are not fetched. `config` is checked ([loss] complete). `stated` is the content of
    config.json if it is known already; then nothing is looked up.

    Raises UserError as `load_model` does, for faults that show without the weights.
    """
    settings = config.model
    module, stated = _unloaded(settings, config.folders) if stated is None else (_from_config(stated), stated)
    shape = _shape(stated, settings.path)
    compute = choose_dtype(settings.dtype, platform, module)
    master = getattr(mx, settings.master)
    if settings.tune != "full":
        new_adapters(module, settings.tune, settings.lora, config.run.seed)
    patch_layers(module)
    trained, frozen = split_leaves(module)
    embeddings = [
        leaf.size for leaf in trained.values() if shape.vocabulary in leaf.shape[:1] and leaf.ndim == 2
    ]
    # Prompts with images are always kept once.
    shares = (sharing_pays() or bool(config.data.image)) and shares_prefix(module)
    packing = _rollout_packing(config)
    return ModelSizes(
        shape=shape,
        weights=WeightSizes(
            trained=sum(leaf.size for leaf in trained.values()),
            master=master.size,
            compute=compute.size,
            moment=getattr(mx, config.optim.moments).size,
            frozen=sum(_held(leaf, compute) for leaf in frozen.values()),
            vision=tower_bytes(stated, Path(settings.path), compute) if config.data.image else 0,
            rollout=_rollout_bytes(config, module, trained, frozen, compute, master),
            reference=_reference_bytes(config, module, trained, compute, master),
            embedding=max(embeddings, default=0),
            sampling=0 if packing else decode_weights_bytes(module, compute),
        ),
        shares_prompts=can_share(module),
        shares_prefix=shares,
    )


def _unloaded(settings: ModelConfig, folders: Sequence[Path]) -> tuple[nn.Module, dict[str, Any]]:
    path, loader = settings.path, custom_loader(settings.loader, folders)
    if loader is not None or path in SHIPPED or Path(path).expanduser().exists():
        folder = resolve_model(path, custom_loader=loader is not None)
        return load_module(folder, settings.trust_remote_code, loader)
    stated = read_config(_fetched_config(path).parent)
    try:
        return _from_config(stated), stated
    except Exception as error:  # mlx-lm's module may fail in any way for an untrusted config
        raise UserError(f"{path}: the model cannot be built: {first_lines(str(error))}") from error


def _fetched_config(name: str) -> Path:
    """config.json of a model on the Hub, from the cache or fetched."""
    from huggingface_hub import hf_hub_download

    with hub_errors(f'model.path = "{name}"'), hub_or_cache():
        return Path(hf_hub_download(name, "config.json"))


def _from_config(stated: dict[str, Any]) -> nn.Module:
    """The module that config.json describes; its random numbers are never computed."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(stated)
    module = model_class(args_class.from_dict(stated))
    dtype = getattr(mx, str(stated.get("torch_dtype") or stated.get("dtype") or "bfloat16"), mx.bfloat16)
    module.set_dtype(dtype)
    packed = stated.get("quantization")
    if packed:
        plain = {key: packed[key] for key in ("group_size", "bits", "mode") if key in packed}

        def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
            if path in packed:
                return packed[path]
            # As in mlx-lm's converter, rows whose length is no multiple of the group are not quantized.
            return hasattr(layer, "to_quantized") and layer["weight"].shape[-1] % plain["group_size"] == 0

        nn.quantize(module, **plain, class_predicate=choose)
    return module


def _shape(stated: dict[str, Any], path: str) -> ModelShape:
    try:
        return model_shape(stated)
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]}; its memory cannot be predicted") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path}: config.json describes no model ({first_lines(str(error))})") from error


def _held(leaf: mx.array, dtype: mx.Dtype) -> int:
    """Bytes of a leaf that is not trained: in the compute dtype if it is floating, else unchanged."""
    return leaf.size * dtype.size if mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes


def _rollout_bytes(
    config: Config,
    module: nn.Module,
    trained: dict[str, mx.array],
    frozen: dict[str, mx.array],
    compute: mx.Dtype,
    master: mx.Dtype,
) -> int:
    """Bytes of a sampler's own weights: 0 if it uses the learner's."""
    rollout = config.rollout
    if rollout.quantization == "none":
        lags = config.loss.sync_every > config.optim.gradient_accumulation_steps
        return sum(leaf.size for leaf in trained.values()) * master.size if lags else 0
    return _role_bytes(config, module, {**trained, **frozen}, compute, _rollout_packing(config))


def _reference_bytes(
    config: Config, module: nn.Module, trained: dict[str, mx.array], compute: mx.Dtype, master: mx.Dtype
) -> int:
    """Bytes of the reference's own weights: 0 if it has none."""
    loss = config.loss
    if not loss.beta:
        return 0
    if loss.ref_quantization == "none":
        return sum(leaf.size for leaf in trained.values()) * master.size
    return _role_bytes(
        config, module, trained, compute, _packing(config, loss.ref_quantization, loss.ref_storage)
    )


def _rollout_packing(config: Config) -> QuantMode | None:
    rollout = config.rollout
    return _packing(config, rollout.quantization, rollout.storage) if rollout.quantization != "none" else None


def _packing(config: Config, name: str, storage: str) -> QuantMode | None:
    """The packed format of a quantized role's weights; None: not packed."""
    if storage != "packed":
        return None
    try:
        return quant_mode(name, config.rollout.group_size if name.startswith("affine") else 0)
    except ValueError as error:
        raise UserError(f"{config.where('rollout.group_size')}: {error}") from error


def _role_bytes(
    config: Config, module: nn.Module, leaves: dict[str, mx.array], dtype: mx.Dtype, mode: QuantMode | None
) -> int:
    head = config.rollout.quantize_head
    rounded = {f"{path}.weight" for path, layer in module.named_modules() if quantizable(path, layer, head)}
    return sum(_packed(leaf, dtype, mode if name in rounded else None) for name, leaf in leaves.items())


def _packed(leaf: mx.array, dtype: mx.Dtype, mode: QuantMode | None) -> int:
    if mode is None or leaf.shape[-1] % mode.group_size:
        return leaf.size * dtype.size
    # Lazy: only its shapes are looked at.
    return sum(part.nbytes for part in quantize(mx.zeros(leaf.shape, dtype), mode).values())
