"""The bytes of a config's model in all its roles. The module is built, but nothing in it is computed.

MLX's arrays are lazy: a new module, or one loaded with `lazy=True`, has shapes and dtypes but uses no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.learner import can_share
from grpo_fn.policy import (
    block_width,
    decode_weights_bytes,
    patch_layers,
    quant_mode,
    quantizable,
    quantize,
    shares_prefix,
    sharing_pays,
)
from grpo_fn.trees import named_leaves, split_leaves
from runners.config.loading import Config
from runners.config.names import SELF, SHIPPED
from runners.errors import UserError, first_lines
from runners.files.hub import hub_errors
from runners.images.tower import tower_bytes
from runners.machine.startup import Platform
from runners.memory.shapes import FLOAT, ModelShape, model_shape
from runners.models.adapters import add_adapters
from runners.models.dtypes import choose_dtype
from runners.models.folders import read_config, resolve_model
from runners.models.model_reader import custom_loader, load_module
from runners.models.role_quantization import is_calibrated


@attrs.frozen(kw_only=True)
class ModelSizes:
    """A model as a config uses it; bytes unless stated otherwise."""

    shape: ModelShape
    shares_prompts: bool  # whether a group's prompt can be computed once in the learner
    shares_prefix: bool  # whether the prompt is kept once while its completions are decoded
    trained: int  # number of trained parameters
    embedding: int  # of these, the embedding's
    parameters: int  # about how many the model has
    dtype: str  # of the computation
    compute: int  # of a number in the computation
    weights: int  # masters, weights that are not trained, and those of the reference and the teacher
    moments: int  # of the optimizer
    copy: int  # the weights in the compute dtype, 0 if the masters have it
    rollout: int  # a sampler with its own weights (quantized, or older)
    decoding: int  # weights that are made for each rollout: `decode_weights`
    rounding: bool  # whether updates of masters are rounded at random
    ranks: int  # number of ranks of the run

    @property
    def gradients(self) -> int:
        """One set of accumulated gradients."""
        return self.trained * FLOAT

    @property
    def floor(self) -> int:
        """The least that any batch setting needs: weights, moments and one set of gradients."""
        return self.weights + self.moments + self.gradients


def model_sizes(
    config: Config, platform: Platform, ranks: int = 1, *, stated: dict[str, Any] | None = None
) -> ModelSizes:
    """The sizes of the model that [model] names, in the roles that the config gives it, on one of `ranks`.

    A local folder is measured by the headers of its weight files. For a model on the Hub only config.json is
    read; its weights are not fetched. `config` is checked ([loss] complete). `stated` is the content of
    config.json if it is known already; then nothing is looked up.

    Raises UserError as `load_model` does, for faults that show without the weights.
    """
    settings, rollout, loss = config.model, config.rollout, config.loss
    if stated is None:
        module, stated = _unloaded(config, settings.path, "model.path", settings.loader)
    else:
        module = _from_config(stated)
    try:
        shape = model_shape(stated)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else f"config.json gives no sizes: {error}"
        raise UserError(f"{settings.path}: {reason}; its memory cannot be predicted") from error
    compute = choose_dtype(settings.dtype, platform, module)
    if settings.tune != "full":
        add_adapters(module, settings, config.run.seed)
    patch_layers(module)
    trained, frozen = split_leaves(module)
    count, master = sum(leaf.size for leaf in trained.values()), getattr(mx, settings.master).size

    def role(
        name: str, storage: str, leaves: Mapping[str, mx.array], unquantized: int, budget: float = 0.0
    ) -> int:
        if name == "none":
            return unquantized
        if storage == "packed":
            return _packed_bytes(config, module, leaves, compute, name, budget)
        return sum(leaf.size for leaf in leaves.values()) * compute.size

    weights = count * master + _in_dtype(frozen, compute)
    weights += tower_bytes(stated, Path(settings.path), compute) if config.data.image else 0
    weights += role(loss.ref_quantization, loss.ref_storage, trained, count * master) if loss.beta else 0
    weights += _calibration_bytes(config, module)
    if config.teacher.path == SELF:
        weights += count * compute.size
    elif config.teacher.path:
        teacher, _ = _unloaded(config, config.teacher.path, "teacher.path")
        weights += _in_dtype(named_leaves(teacher.parameters()), compute)
    lags = loss.sync_every > config.optim.gradient_accumulation_steps
    packed = rollout.quantization != "none" and rollout.storage == "packed"
    return ModelSizes(
        shape=shape,
        shares_prompts=can_share(module),
        # Prompts with images are always kept once.
        shares_prefix=(sharing_pays() or bool(config.data.image)) and shares_prefix(module),
        trained=count,
        embedding=max(
            (x.size for x in trained.values() if x.ndim == 2 and x.shape[0] == shape.vocabulary), default=0
        ),
        parameters=count + _in_dtype(frozen, compute) // compute.size,
        dtype=str(compute).removeprefix("mlx.core."),
        compute=compute.size,
        weights=weights,
        moments=2 * count * getattr(mx, config.optim.moments).size,
        copy=0 if compute.size == master else count * compute.size,
        rollout=role(
            rollout.quantization,
            rollout.storage,
            trained | frozen,
            count * master if lags else 0,
            rollout.bits_budget,
        ),
        decoding=0 if packed else decode_weights_bytes(module, compute),
        rounding=master < FLOAT,
        ranks=ranks,
    )


def _in_dtype(leaves: Mapping[str, mx.array], dtype: mx.Dtype) -> int:
    """Bytes of leaves whose floating ones are in this dtype."""
    return sum(
        leaf.size * dtype.size if mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes
        for leaf in leaves.values()
    )


def _unloaded(config: Config, path: str, key: str, loading: str = "") -> tuple[nn.Module, dict[str, Any]]:
    loader = custom_loader(loading, config.folders)
    if loader is not None or path in SHIPPED or Path(path).expanduser().exists():
        folder = resolve_model(path, key, custom_loader=loader is not None)
        return load_module(folder, config.model.trust_remote_code, loader)
    from huggingface_hub import hf_hub_download

    with hub_errors(f'{key} = "{path}"'):
        stated = read_config(Path(hf_hub_download(path, "config.json")).parent)
    try:
        return _from_config(stated), stated
    except Exception as error:  # mlx-lm's module may fail in any way for an untrusted config
        raise UserError(f"{path}: the model cannot be built: {first_lines(str(error))}") from error


def _from_config(stated: dict[str, Any]) -> nn.Module:
    """The module that config.json describes; its random numbers are never computed."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(stated)
    module = model_class(args_class.from_dict(stated))
    dtype = getattr(mx, str(stated.get("torch_dtype") or stated.get("dtype") or "bfloat16"), mx.bfloat16)
    module.set_dtype(dtype)
    if packed := stated.get("quantization"):
        plain = {key: packed[key] for key in ("group_size", "bits", "mode") if key in packed}

        def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
            # As in mlx-lm's converter, rows whose length is no multiple of the group are not quantized.
            fits = hasattr(layer, "to_quantized") and layer["weight"].shape[-1] % plain["group_size"] == 0
            return packed.get(path, fits)

        nn.quantize(module, **plain, class_predicate=choose)
    return module


def _calibration_bytes(config: Config, module: nn.Module) -> int:
    """At most: layers that share their inputs, and so their moments, are counted one by one."""
    names = [config.rollout.quantization, config.loss.ref_quantization if config.loss.beta else "none"]
    if not any(is_calibrated(config, name) for name in names):
        return 0
    group = config.rollout.group_size or 64
    widths = [
        layer["weight"].shape[-1]
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and quantizable(path, layer, False)
    ]
    return sum(2 * 2 * width * block_width(width, group) for width in widths if width % group == 0)


def _packed_bytes(
    config: Config,
    module: nn.Module,
    leaves: Mapping[str, mx.array],
    dtype: mx.Dtype,
    quantization: str,
    budget: float,
) -> int:
    """The weights of a quantized role that is kept packed; `budget`: bits on average, 0: the format's."""
    try:
        mode = quant_mode(quantization, config.rollout.group_size_of(quantization))
    except ValueError as error:
        raise UserError(f"{config.where('rollout.group_size')}: {error}") from error
    head = config.rollout.quantize_head
    rounded = {f"{path}.weight" for path, layer in module.named_modules() if quantizable(path, layer, head)}

    def nbytes(name: str, leaf: mx.array) -> int:
        if name not in rounded or leaf.shape[-1] % mode.group_size:
            return leaf.size * dtype.size
        if budget:
            wider = 16 * dtype.size - 32  # bits of a scale and a bias, more than a budget counts
            return int(leaf.size * (budget + wider / mode.group_size) / 8)
        return sum(part.nbytes for part in quantize(mx.zeros(leaf.shape, dtype), mode).values())  # lazy

    return sum(nbytes(name, leaf) for name, leaf in leaves.items())
