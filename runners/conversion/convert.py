"""Converts Hugging Face models, GGUF files and nanochat checkpoints to MLX folders, optionally
quantized.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from runners.conversion.gguf.reading import convert_gguf
from runners.conversion.nanochat import (
    convert_checkpoint,
    find_checkpoint,
    find_pickle,
    read_encoding,
)
from runners.conversion.packing import NOT_PACKED, QuantizationOptions, moments_from, repack
from runners.errors import UserError
from runners.files.durable import check_target, new_folder
from runners.files.json_files import read_json
from runners.images.processor import has_vision
from runners.models.folders import copy_companions, has_tokenizer, resolve_model
from runners.models.model_reader import load_module, read_model
from runners.tokenization.tiktoken_encoding import write_tokenizer


def convert(
    source: str,
    target: Path,
    *,
    quantization: QuantizationOptions = NOT_PACKED,
    dequantize: bool = False,
    dtype: str = "",
    calibrate: str = "",
    column: str = "prompt",
    force: bool = False,
    step: int | None = None,
    text_only: bool = False,
    trust_remote_code: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Writes the MLX folder `target` atomically, and returns it.

    Args:
        source: a folder or Hub name that mlx-lm can load, a GGUF file, or a folder of nanochat's
            checkpoints.
        target: the new folder; an existing one requires `force`.
        quantization: how mlx-lm packs the weights.
        dequantize: unpack a quantized model before any packing.
        dtype: "float32", "float16" or "bfloat16"; "" keeps the source's dtype.
        calibrate: a file with prompts in `column`. The model completes the prompts, and linear
            layers are rounded so that their outputs on these texts change little. If empty, weights
            are rounded to nearest.
        step: the nanochat checkpoint's step; None means the last one.
        text_only: convert only the language part of a vision-language model.
        trust_remote_code: run code that is part of the model.
        note: called with messages about calibration progress.

    Raises UserError for missing or unknown inputs, and for a target that cannot be written.
    """
    if calibrate and not quantization.affine:
        raise UserError(
            "--calibrate requires --bits or --recipe, because only affine formats can be calibrated"
        )
    if calibrate and quantization.bits == 5:
        raise UserError("--calibrate with --bits 5: expected 2, 3, 4, 6 or 8")
    check_target(target, force)
    path = Path(source).expanduser()
    checkpoint = find_checkpoint(path, step)
    is_foreign = checkpoint is not None or path.suffix == ".gguf"
    pickled = find_pickle(path) if path.is_dir() and not has_tokenizer(path) else None
    if not is_foreign:
        path = resolve_model(source, "SOURCE", tokenizer=pickled is None)
        if has_vision(read_json(path / "config.json")) and not text_only:
            raise UserError(
                f"{path}: this is a vision-language model; convert it with mlx_vlm.convert, or "
                f"only its language part with --text-only"
            )
    check_apart(target, path)
    with new_folder(target, replace=force) as temporary:
        if checkpoint is not None:
            model, meta, encoding = checkpoint
            convert_checkpoint(model, meta, encoding, temporary)
        elif is_foreign:
            convert_gguf(path, temporary, dequantize=dequantize or quantization.wanted)
            dequantize = False
        if is_foreign:
            try:
                read_model(temporary)
            except UserError as error:  # a part that is missing or does not fit
                raise UserError(str(error).replace(str(temporary), str(path))) from error
            if not (quantization.wanted or dtype):
                return target
            path = temporary
        if calibrate:
            module, config, tokenizer, _ = read_model(path, trust_remote_code)
            collect = moments_from(calibrate, column, tokenizer, note)
        else:
            module, config = load_module(path, trust_remote_code)
            collect = None
        module, config = repack(module, config, quantization, dtype, dequantize, collect)
        if is_foreign:  # the file that the weights are read from is replaced
            mx.eval(module.parameters())
        else:
            copy_companions(path, temporary)
            if pickled is not None:
                write_tokenizer(read_encoding(pickled), temporary)
        write_weights(temporary, module, config)
    return target


def check_apart(target: Path, *sources: Path) -> None:
    """Raises UserError if a source is the target or inside it."""
    for source in sources:
        if source.resolve().is_relative_to(target.resolve()):
            raise UserError(
                f"{target}: the source {source} is inside this folder; expected a different folder"
            )


def write_weights(folder: Path, module: nn.Module, config: dict[str, Any]) -> None:
    """Writes config.json and the weights into a folder, replacing existing files. The module's
    weights are removed from memory.
    """
    from mlx_lm.utils import save_config, save_model

    for file in (*folder.glob("model*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_model(folder, module, donate_model=True)
    sees = "vision_tower" in getattr(module, "model", {})
    save_config(dict(config), folder / "config.json", keep_vision_config=sees)
