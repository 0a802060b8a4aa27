"""Writes model folders that mlx-lm can open: a run's final model, and the weights of its
checkpoints.

`final/` contains the model in its original dtype with merged adapters, and the adapters themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from grpo_fn.policy import is_quantized
from grpo_fn.trees import named_leaves
from runners.files.durable import new_folder
from runners.files.json_files import read_json, write_json
from runners.files.run_files import EVALUATION
from runners.files.tensor_files import save_arrays
from runners.images.processor import with_text_keys
from runners.models.adapters import ADAPTER_CONFIG, ADAPTERS, BASE_DIGEST, fused_layers
from runners.models.folders import TEMPLATE_FILE, copy_companions, read_config
from runners.models.loaded_model import LoadedModel
from runners.models.model_reader import is_floating
from runners.tokenization.prompt_settings import PromptSettings, write_prompt

_MLX = {"format": "mlx"}  # mlx-lm and transformers read it


def save_model(
    folder: Path,
    params: Any,
    loaded: LoadedModel,
    prompt: PromptSettings | None = None,
    *,
    evaluation: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model folder from trained parameters. Floating weights are stored in the source
    model's dtypes.

    A vision-language model keeps its vision tower, so that mlx-vlm loads the folder; mlx-lm ignores
    the tower. Adapters are merged into the weights, and `adapters.safetensors` and
    `adapter_config.json` are written beside them for `mlx_lm.load(base, adapter_path=folder)`. On a
    quantized base the merged layers are stored unquantized, because rounding them to few bits again
    would undo much of a small update.

    If an `evaluation` is given, it is written as evaluation.json and only the adapters are written.
    """
    with new_folder(folder) as temporary:
        if evaluation is not None:
            write_json(temporary / EVALUATION, evaluation)
        config = _stated(loaded)
        weights = trained(params, loaded)
        if loaded.adapter is not None:
            write_trained(temporary, weights, loaded)
            if evaluation is not None:
                write_prompt(temporary, prompt)
                return folder
            weights, merged = merge_adapters(params, loaded)
            if is_quantized(loaded.module):
                config.pop("quantization_config", None)
                config["quantization"] = {
                    **loaded.config["quantization"],
                    **dict.fromkeys(merged, False),
                }
        weights = {name: _as_source(name, array, loaded) for name, array in weights.items()}
        if loaded.vision is not None:
            weights |= loaded.vision.weights()
        save_arrays(temporary / "model.safetensors", weights, _MLX)
        if loaded.vision is not None:  # else mlx-vlm would read the adapters' file as well
            index = {
                "metadata": {"total_size": sum(array.nbytes for array in weights.values())},
                "weight_map": dict.fromkeys(sorted(weights), "model.safetensors"),
            }
            write_json(temporary / "model.safetensors.index.json", index)
            config = with_text_keys(config, loaded.path)
        _write_companions(temporary, config, loaded)
        write_prompt(temporary, prompt)  # replaces the source model's file, which was copied
    return folder


def merge_adapters(params: Any, loaded: LoadedModel) -> tuple[dict[str, mx.array], list[str]]:
    """Returns the flat weights, with merged adapters, and the names of the changed layers."""
    module = loaded.module
    saved = module.parameters()
    try:
        module.update(tree_unflatten(list(loaded.frozen.items())))
        module.update(params)
        layers = fused_layers(module)
        fused = {name: layer.parameters() for name, layer in layers.items()}
        weights = {
            name: array
            for name, array in named_leaves(module.parameters()).items()
            if not any(name.startswith(f"{layer}.") for layer in layers)
        }
        weights |= named_leaves(fused)
        mx.eval(weights)
    finally:
        module.update(saved)
    return weights, list(layers)


def trained(params: Any, loaded: LoadedModel) -> dict[str, mx.array]:
    """Returns the arrays that a weights file stores for the trained parameters: only adapters, or
    the whole model.
    """
    return (
        named_leaves(params) if loaded.adapter is not None else named_leaves(params) | loaded.frozen
    )


def write_trained(folder: Path, weights: dict[str, mx.array], loaded: LoadedModel) -> None:
    """Writes weights from `trained`, with the files that mlx-lm needs to load them."""
    if loaded.adapter is None:
        save_arrays(folder / "model.safetensors", weights, _MLX)
    else:
        save_arrays(folder / ADAPTERS, weights, _MLX)
        source = str(loaded.path) if Path(loaded.settings.path).exists() else loaded.settings.path
        config = {
            "fine_tune_type": loaded.settings.tune,
            "model": source,
            BASE_DIGEST: loaded.base_digest,
            **loaded.adapter,
        }
        write_json(folder / ADAPTER_CONFIG, config)
    _write_companions(folder, _stated(loaded), loaded)


def _stated(loaded: LoadedModel) -> dict:
    """Returns the source's config.json with mlx-lm's keys. With a custom loader, the config is
    unchanged.
    """
    config = (
        read_json(loaded.path / "config.json")
        if loaded.settings.loader
        else read_config(loaded.path)
    )
    if loaded.adapter is None:
        config.pop("quantization_config", None)  # unpacked while it was loaded
    return config


def _write_companions(folder: Path, config: dict, loaded: LoadedModel) -> None:
    write_json(folder / "config.json", config)
    copy_companions(loaded.path, folder)
    if loaded.chat_template:
        (folder / TEMPLATE_FILE).write_text(loaded.chat_template, encoding="utf-8")


def _as_source(name: str, array: mx.array, loaded: LoadedModel) -> mx.array:
    if not is_floating(array):
        return array
    dtype = loaded.source_dtypes.get(name, loaded.source_dtype)
    return array.astype(dtype if mx.issubdtype(dtype, mx.floating) else loaded.source_dtype)
