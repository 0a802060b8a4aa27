"""Prepares a model for training: weights in the right dtypes, trainable and frozen parts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy import is_quantized
from grpo_fn.trees import materialize_in_parts, named_leaves, split_leaves
from runners.config.sections import ModelConfig
from runners.errors import UserError
from runners.files.json_files import read_json
from runners.images.processor import check_family, has_vision
from runners.images.tower import VisionPart, prepare_vision
from runners.models.adapters import add_adapters, base_digest
from runners.models.folders import resolve_model
from runners.models.model_reader import (
    cast_floating,
    choose_dtype,
    custom_loader,
    main_dtype,
    read_model,
)

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runners.machine.startup import Platform


@attrs.frozen(eq=False)
class LoadedModel:
    """A model ready for `Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)`."""

    module: nn.Module  # trainable leaves in the master dtype, the others in the compute dtype
    tokenizer: TokenizerWrapper
    config: dict  # config.json in mlx-lm's spelling
    path: Path  # the folder it was loaded from
    settings: ModelConfig  # the config's [model]
    adapter: dict | None  # mlx-lm's lora_parameters and num_layers; None if tune is "full"
    compute_dtype: mx.Dtype
    source_dtypes: dict[str, mx.Dtype]  # flat name -> dtype in the model's files, and in final/
    source_dtype: mx.Dtype  # the dtype of most of its floating weights
    frozen: dict[str, mx.array]  # flat name -> leaf that is not trained
    eos_ids: tuple[int, ...]
    num_parameters: int  # of the model without adapters; packed weights counted unpacked
    num_trainable: int
    notices: tuple[str, ...] = ()
    base_digest: str = ""  # of the weights under adapters; "" if tune is "full"
    vision: VisionPart | None = None  # its vision part, if prompts have images
    chat_template: str = ""  # replaces the folder's own template; empty: not replaced


def load_model(
    settings: ModelConfig,
    platform: Platform,
    *,
    seed: int = 0,
    folders: Sequence[Path] = (),
    images: bool = False,
    image_max_pixels: int = 0,
) -> LoadedModel:
    """Loads, checks and prepares the model that [model] names. `seed` determines the adapters'
    initial values.

    A custom `loader` is looked up in `folders` (see `resolve_function`). With `images`, prompts may
    have images, which are scaled down to `image_max_pixels`; 0 means the limit of the model's
    processor.

    Raises UserError if the folder is incomplete, if the architecture is unknown, if weights are
    missing, unexpected or not finite, if the tokenizer's vocabulary exceeds the embedding, if the
    weights are packed with `tune = "full"`, if `lora.keys` or `lora.layers` name missing layers, or
    if `adapters` do not fit. With `images`, also raises the errors of `prepare_vision`.
    """
    from mlx_lm.utils import get_total_parameters

    loader = custom_loader(settings.loader, folders)
    path = resolve_model(settings.path, custom_loader=loader is not None)
    if images:
        check_family(read_json(path / "config.json"), path)  # before minutes of reading
    module, config, tokenizer, notices = read_model(path, settings.trust_remote_code, loader)
    source_dtypes = {name: leaf.dtype for name, leaf in named_leaves(module.parameters()).items()}
    source_dtype = main_dtype(module)
    compute_dtype = choose_dtype(settings.dtype, platform, module)
    num_parameters = get_total_parameters(module)
    vision = prepare_vision(module, path, compute_dtype, image_max_pixels) if images else None
    if not images and loader is None and has_vision(config):
        notices += (
            f"{path}: this is a vision-language model, but without images only its language part "
            f"is trained and saved; data.image sets the image column",
        )

    adapter = None
    digest = ""
    if settings.tune != "full":
        digest = base_digest(named_leaves(module.parameters()))
        # Before adapters are added, because DoRA measures the weights in the compute dtype.
        cast_floating(module, compute_dtype)
        adapter = add_adapters(module, settings, seed, digest)
    elif is_quantized(module):
        raise UserError(
            f'model.tune = "full", but the weights of {path} are quantized: expected model.tune = '
            f'"lora" or "dora", or a model dequantized with `grpo convert '
            f"{shlex.quote(settings.path)} --out NEW --dequantize`"
        )
    cast_floating(module, getattr(mx, settings.master), named_leaves(module.trainable_parameters()))
    trainable, frozen = split_leaves(module)
    materialize_in_parts(module.parameters())
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        config=config,
        path=path,
        settings=settings,
        adapter=adapter,
        compute_dtype=compute_dtype,
        source_dtypes=source_dtypes,
        source_dtype=source_dtype,
        frozen=frozen,
        eos_ids=tuple(sorted(tokenizer.eos_token_ids)),
        num_parameters=num_parameters,
        num_trainable=sum(leaf.size for leaf in trainable.values()),
        notices=notices,
        base_digest=digest,
        vision=vision,
    )
