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
    master: int  # of one master weight, which the optimizer changes
    compute: int  # of a number in the computation
    dtype: str  # of the computation
    moment: int  # of a number in one of the optimizer's two moments
    frozen: int  # parameters that are not trained
    vision: int  # a vision tower, which is not trained either
    rollout: int  # a sampler with its own weights (quantized, or older)
    reference: int  # a reference (beta > 0)
    decoding: int  # weights that are made for each rollout: `decode_weights`
    calibration: int = 0  # inputs' moments for the rounding of roles, and what is made of them
    teacher: int = 0  # weights of a teacher
    teacher_shape: ModelShape | None = None  # None: there is none
    ranks: int = 1  # number of ranks of the run
    sharded: bool = False  # whether masters and moments are split over the ranks

    @property
    def held(self) -> dict[str, float]:
        """What is in memory in every phase, by name."""
        masters, part = self.trained * self.master, self.ranks if self.sharded else 1
        return {
            "weights": self.trained * self.compute + masters // part if self.sharded else masters,
            "frozen weights": self.frozen,
            "vision tower": self.vision,
            "moments": 2 * self.trained * self.moment // part,
            "reference weights": self.reference,
            "teacher weights": self.teacher,
            "calibration": self.calibration,
        }

    @property
    def parameters(self) -> int:
        """About how many the model has."""
        return self.trained + self.frozen // self.compute

    @property
    def copy(self) -> int:
        """The weights' copy in the compute dtype, 0 if the masters have that dtype."""
        return 0 if self.sharded or self.compute == self.master else self.trained * self.compute

    @property
    def gradients(self) -> int:
        """One set of accumulated gradients."""
        return self.trained * FLOAT

    @property
    def floor(self) -> int:
        """The least that any batch setting needs: weights, moments and one set of gradients."""
        return round(sum(self.held.values()) + self.gradients)


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
    shape = _shape(stated, settings.path)
    compute = choose_dtype(settings.dtype, platform, module)
    if settings.tune != "full":
        add_adapters(module, settings, config.run.seed)
    patch_layers(module)
    trained, frozen = split_leaves(module)
    count = sum(leaf.size for leaf in trained.values())
    master = getattr(mx, settings.master).size
    lags = loss.sync_every > config.optim.gradient_accumulation_steps

    def role(quantization: str, storage: str, leaves: Mapping[str, mx.array], unquantized: int) -> int:
        if quantization == "none":
            return unquantized
        if storage == "packed":
            return _packed_bytes(config, module, leaves, compute, quantization)
        return sum(leaf.size for leaf in leaves.values()) * compute.size

    teacher, teacher_shape = 0, None
    if config.teacher.path == SELF:
        teacher, teacher_shape = count * compute.size, shape
    elif config.teacher.path:
        other, told = _unloaded(config, config.teacher.path, "teacher.path")
        teacher, teacher_shape = (
            _in_dtype(named_leaves(other.parameters()), compute),
            _shape(told, config.teacher.path),
        )
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
        master=master,
        compute=compute.size,
        dtype=str(compute).removeprefix("mlx.core."),
        moment=getattr(mx, config.optim.moments).size,
        frozen=_in_dtype(frozen, compute),
        vision=tower_bytes(stated, Path(settings.path), compute) if config.data.image else 0,
        rollout=role(rollout.quantization, rollout.storage, trained | frozen, count * master if lags else 0),
        reference=role(loss.ref_quantization, loss.ref_storage, trained, count * master) if loss.beta else 0,
        calibration=_calibration_bytes(config, module),
        decoding=0 if packed else decode_weights_bytes(module, compute),
        teacher=teacher,
        teacher_shape=teacher_shape,
        ranks=ranks,
        sharded=config.optim.shard and ranks > 1,
    )


def _in_dtype(leaves: Mapping[str, mx.array], dtype: mx.Dtype) -> int:
    """Bytes of leaves whose floating ones are in this dtype."""
    return sum(
        leaf.size * dtype.size if mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes
        for leaf in leaves.values()
    )


def _shape(stated: dict[str, Any], path: str) -> ModelShape:
    """The sizes that a config.json states. Raises UserError if it does not."""
    try:
        return model_shape(stated)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else f"config.json gives no sizes: {error}"
        raise UserError(f"{path}: {reason}; its memory cannot be predicted") from error


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
    return sum(2 * FLOAT * width * block_width(width, group) for width in widths if width % group == 0)


def _packed_bytes(
    config: Config, module: nn.Module, leaves: Mapping[str, mx.array], dtype: mx.Dtype, quantization: str
) -> int:
    """The weights of a quantized role that is kept packed."""
    try:
        mode = quant_mode(quantization, config.rollout.group_size_of(quantization))
    except ValueError as error:
        raise UserError(f"{config.where('rollout.group_size')}: {error}") from error
    head = config.rollout.quantize_head
    rounded = {f"{path}.weight" for path, layer in module.named_modules() if quantizable(path, layer, head)}

    def nbytes(name: str, leaf: mx.array) -> int:
        if name not in rounded or leaf.shape[-1] % mode.group_size:
            return leaf.size * dtype.size
        return sum(part.nbytes for part in quantize(mx.zeros(leaf.shape, dtype), mode).values())  # lazy

    return sum(nbytes(name, leaf) for name, leaf in leaves.items())
