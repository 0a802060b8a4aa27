"""Computes the size in bytes of a config's model in all its roles. The module is created, but no
array in it is computed.

MLX's arrays are lazy: the arrays of a new module, or of a module loaded with `lazy=True`, have
shapes and dtypes but need no memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn import policy
from grpo_fn.backends import enabled, find, number
from grpo_fn.learner import can_share
from grpo_fn.policy import sharing_pays
from grpo_fn.trees import named_leaves, split_leaves
from runners.config.loading import Config
from runners.config.names import SELF, SHIPPED
from runners.errors import first_lines, user_errors
from runners.images.tower import tower_bytes
from runners.machine.startup import Platform
from runners.models.adapters import add_adapters
from runners.models.folders import hub_errors, read_config, resolve_model
from runners.models.model_reader import choose_dtype, custom_loader, load_module, main_dtype
from runners.models.role_quantization import is_calibrated

FLOAT = 4  # bytes of float32


@attrs.frozen(kw_only=True)
class ModelShape:
    """Sizes of a decoder, which determine the memory for its activations."""

    layers: int
    hidden: int
    intermediate: int  # width for one token; with experts, summed over those that it uses
    heads: int
    queries: int  # size of a position's queries
    keys: int  # size of a position's keys, and of its values
    vocabulary: int
    tied: bool  # the output head is tied to the embedding
    gated: bool  # the MLP is gated by a SiLU, whose arrays a backend may save


@attrs.frozen(kw_only=True)
class ModelSizes:
    """Sizes of a model in the roles that a config gives it, in bytes unless stated otherwise."""

    shape: ModelShape
    shares_prompts: bool  # whether a group's prompt is computed once in the learner
    recomputes_mlps: bool  # whether MLPs are recomputed in the backward pass
    shares_prefix: bool  # whether a prompt is kept once while its completions are decoded
    trained: int  # number of trained parameters
    embedding: int  # number of trained parameters in the embedding
    parameters: int  # approximate number of all parameters
    dtype: str  # compute dtype
    compute: int  # bytes per number in the compute dtype
    # master weights, frozen weights, and the weights of the reference and the teacher
    weights: int
    moments: int  # the optimizer's moments
    copy: int  # the weights in the compute dtype, 0 if the master weights have this dtype
    rollout: int  # the sampler's own weights (quantized, or older)
    decoding: int  # temporary weights of a rollout: `decode_weights`
    blocks: int  # copies of weights in blocks, for rollouts of at most `block_rows` rows
    ranks: int  # number of ranks of the run
    written: int  # bytes written to `final/` and `best/`

    @property
    def gradients(self) -> int:
        """The size of one accumulated set of gradients."""
        return self.trained * FLOAT

    @property
    def floor(self) -> int:
        """The minimum for any batch settings: weights, moments and one set of gradients."""
        return self.weights + self.moments + self.gradients


def models_bytes(config: Config, parameters: int, trained: int, size: int) -> int:
    """Returns the bytes on disk for a run's final model and its best model. When adapters are
    trained, the best model contains only the adapters. `size` is the number of bytes per number in
    the source's files.
    """
    final = parameters * size  # every parameter, unpacked
    if config.model.tune != "full":
        return final + 2 * trained * FLOAT
    return 2 * final if config.checkpoint.keep_best else final


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Reads a model's shape from its config.json.

    Raises ValueError if layers, width, heads or vocabulary are missing.
    """
    config = {**config, **(config.get("text_config") or {})}

    def first(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise ValueError(f"it contains none of {', '.join(names)}")
        return int(value)

    hidden = first("hidden_size", "n_embd", "d_model", "dim")
    heads = first("num_attention_heads", "n_head", "n_heads")
    width = first("head_dim", default=hidden // heads)
    wide = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_top_k", default=0)
    if chosen:
        expert = first("moe_intermediate_size", default=wide)
        shared = first("n_shared_experts", default=0) * expert
        wide = chosen * expert + first("shared_expert_intermediate_size", default=shared)
    return ModelShape(
        layers=first("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        queries=heads * width,
        keys=first("num_key_value_heads", "n_head_kv", default=heads) * width,
        vocabulary=first("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        gated=config.get("model_type") != "nanochat",
    )


def model_sizes(
    config: Config, platform: Platform, ranks: int = 1, *, stated: dict[str, Any] | None = None
) -> ModelSizes:
    """Computes the sizes that the model in [model] has in its roles in the config, on one of
    `ranks` ranks.

    For a local folder, the headers of its weight files are read. For a model on the Hub, only
    config.json is read; its weights are not downloaded. `config` is checked ([loss] complete).
    `stated` is the content of config.json if it is already known; in that case, no file is looked
    up.

    Raises the errors of `load_model` that do not depend on the weights.
    """
    settings = config.model
    rollout = config.rollout
    loss = config.loss
    if stated is None:
        module, stated = _unloaded(config, settings.path, "model.path", settings.loader)
    else:
        module = _from_config(stated)
    with user_errors(
        f"{settings.path}: the model's memory cannot be predicted from config.json",
        *(TypeError, ValueError, AttributeError, ArithmeticError),
    ):
        shape = model_shape(stated)
    compute = choose_dtype(settings.dtype, platform, module)
    stored = main_dtype(module).size
    if settings.tune != "full":
        add_adapters(module, settings, config.run.seed)
    policy.patch_layers(module)
    trained, frozen = split_leaves(module)
    leaves = trained | frozen
    tables = {
        name: leaf.size for name, leaf in leaves.items() if leaf.shape[:1] == (shape.vocabulary,)
    }
    count = sum(leaf.size for leaf in trained.values())
    masters = count * getattr(mx, settings.master).size
    copy = count * compute.size
    base = _in_dtype(frozen, compute)

    def role(name: str, storage: str, part: int, bits: float = 0.0) -> int:
        """Returns the bytes of a role that has `part` rounded weights. Embeddings and output head
        are often not rounded.
        """
        if storage != "packed":
            return part * compute.size
        mode = policy.quant_mode(name, rollout.group_size_of(name))
        # bits per group: scale and bias, or one byte
        scales = 16 * compute.size if mode.mode == "affine" else 8
        whole = 0 if rollout.quantize_head else sum(tables.values())
        if settings.tune != "full":
            whole += count
        stored = bits or mode.bits + scales / mode.group_size
        return int((part - whole) * stored / 8) + whole * compute.size

    weights = masters + base
    if config.data.image:
        weights += tower_bytes(stated, Path(settings.path), compute)
    if loss.beta and loss.ref_quantization == "none":
        weights += masters
    elif loss.beta:
        weights += role(loss.ref_quantization, loss.ref_storage, count)
    if any(is_calibrated(config, name) for name in (rollout.quantization, loss.ref_quantization)):
        # The moments for the inputs to a block's seven products, each counted although some are
        # shared.
        for width in [shape.hidden] * 5 + [shape.queries, shape.intermediate]:
            if width % 64 == 0:
                weights += shape.layers * FLOAT * width * policy.block_width(width, 64)
    if config.teacher.path == SELF:
        weights += copy
    elif config.teacher.path:
        teacher, _ = _unloaded(config, config.teacher.path, "teacher.path")
        weights += _in_dtype(named_leaves(teacher.parameters()), compute)
    rounds = rollout.quantization != "none"
    lags = loss.sync_every > config.optim.gradient_accumulation_steps
    sampler = masters * max(lags, rollout.max_staleness)
    if rounds:
        numbers = sum(leaf.size for leaf in leaves.values())
        sampler = role(rollout.quantization, rollout.storage, numbers, rollout.bits_budget)
    packed = rounds and rollout.storage == "packed"
    parameters = count + base // compute.size
    matrices = [leaf for leaf in leaves.values() if leaf.ndim == 2]
    blocks = FLOAT * sum(leaf.size for leaf in matrices if mx.issubdtype(leaf.dtype, mx.floating))
    has_blocks = compute == mx.float32 and blocks <= number("block_bytes")
    # Prompts with images are always kept once; prompts in conversations are never kept once.
    once = (sharing_pays() or bool(config.data.image)) and not config.env.answers
    return ModelSizes(
        shape=shape,
        shares_prompts=shares_prompts(config, platform, module),
        recomputes_mlps=checkpoints_mlps(config) and len(policy.gated_mlps(module)) == shape.layers,
        shares_prefix=once and policy.shares_prefix(module),
        trained=count,
        embedding=max((tables[name] for name in tables if name in trained), default=0),
        parameters=parameters,
        dtype=str(compute).removeprefix("mlx.core."),
        compute=compute.size,
        weights=weights,
        moments=2 * count * getattr(mx, config.optim.moments).size,
        copy=0 if copy == masters else copy,
        rollout=sampler,
        decoding=0 if packed else policy.decode_weights_bytes(module, compute),
        blocks=blocks if has_blocks and find("decode_blocks") else 0,
        ranks=ranks,
        written=models_bytes(config, parameters, count, stored),
    )


def shares_prompts(config: Config, platform: Platform, module: nn.Module) -> bool:
    """Returns whether the learner computes a group's prompt once. On a GPU, prompts are shared only
    if requested, because attention would need a mask array.

    Prompts are not shared if blocks are checkpointed, because these blocks would be recomputed
    without the prompt's keys, or if routers' decisions are recorded over complete rows.
    """
    loss = config.loss
    if config.system.grad_checkpoint or loss.router_aux_coef or loss.router_replay:
        return False
    wish = config.system.share_prompts
    wanted = wish == "always" or (wish == "auto" and platform.backend == "cpu")
    return wanted and can_share(module)


def checkpoints_mlps(config: Config) -> bool:
    """Returns whether gated MLPs recompute their inner activations in the backward pass."""
    wanted = number("checkpoints_mlps") and enabled("checkpointed_mlps")
    return bool(wanted) and not config.system.grad_checkpoint


def _in_dtype(leaves: Mapping[str, mx.array], dtype: mx.Dtype) -> int:
    """Returns the leaves' bytes if all floating leaves have this dtype."""
    return sum(
        leaf.size * dtype.size if mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes
        for leaf in leaves.values()
    )


def _unloaded(
    config: Config, path: str, key: str, loading: str = ""
) -> tuple[nn.Module, dict[str, Any]]:
    loader = custom_loader(loading, config.folders)
    if loader is not None or path in SHIPPED or Path(path).expanduser().exists():
        folder = resolve_model(path, key, custom_loader=loader is not None)
        return load_module(folder, config.model.trust_remote_code, loader)
    from httpx2 import ConnectError, HTTPError
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import LocalEntryNotFoundError

    with hub_errors(f'{key} = "{path}"'):
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            # Without a network, a download is retried for 23 seconds, with one line for each attempt.
            try:
                get_hf_file_metadata(hf_hub_url(path, "config.json"))
            except ConnectError as error:
                raise LocalEntryNotFoundError(str(error)) from error
            # The download raises the same error, and is retried or reports the error.
            except (HTTPError, OSError, ValueError):
                pass
        stated = read_config(Path(hf_hub_download(path, "config.json")).parent)
    # mlx-lm's module may fail in any way for an untrusted config
    with user_errors(f"{path}: the model cannot be built", Exception, why=first_lines):
        return _from_config(stated), stated


def _from_config(stated: dict[str, Any]) -> nn.Module:
    """Creates the module that config.json describes. Its random initial values are never
    computed.
    """
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(stated)
    module = model_class(args_class.from_dict(stated))
    named = str(stated.get("torch_dtype") or stated.get("dtype"))
    module.set_dtype(getattr(mx, named, mx.bfloat16))
    packed = stated.get("quantization")
    if packed:
        plain = {key: packed[key] for key in ("group_size", "bits", "mode") if key in packed}

        def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
            # As in mlx-lm's converter, rows whose length is not a multiple of the group size are not
            # quantized.
            fits = (
                hasattr(layer, "to_quantized")
                and layer["weight"].shape[-1] % plain["group_size"] == 0
            )
            return packed.get(path, fits)

        nn.quantize(module, **plain, class_predicate=choose)
    return module
