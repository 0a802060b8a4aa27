"""Conversion: Hugging Face models and nanochat checkpoints to MLX folders, quantized where asked for."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from runners.conversion.nanochat_checkpoint import convert_checkpoint, find_checkpoint, is_checkpoint
from runners.conversion.vision import convert_vision
from runners.errors import UserError, first_line
from runners.files.durable import check_target, new_folder
from runners.files.json_files import read_json
from runners.images.families import has_vision
from runners.models.folders import copy_companions, read_config, resolve_model, tokenizer_pickle
from runners.tokenization.prompt_settings import read_prompt, write_prompt

if TYPE_CHECKING:
    import mlx.nn as nn

DEFAULT_GROUP_SIZES = {"affine": 64, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
BITS = {"affine": 4, "mxfp4": 4, "nvfp4": 4, "mxfp8": 8}
_NOTHING_PACKED = "nothing was quantized: no layer's width is a multiple of the group size"


@attrs.frozen(kw_only=True)
class QuantizationOptions:
    """How weights are packed; without any option they are not packed."""

    mode: str = ""  # "affine", "mxfp4", "nvfp4", "mxfp8"
    bits: int | None = None  # of "affine"
    group_size: int | None = None
    recipe: str = ""  # one of mlx-lm's mixed ones

    @property
    def wanted(self) -> bool:
        """Whether any option asks for packing."""
        return bool(self.mode or self.recipe or self.bits)

    def check(self) -> None:
        """Raises UserError for numbers that the mode does not support."""
        if self.group_size and not self.wanted:
            raise UserError("--group-size without --bits, --mode or --recipe: nothing would be quantized")
        if self.recipe and (self.bits or self.mode not in ("", "affine")):
            raise UserError(
                "--recipe chooses the bits itself, of affine quantization; leave --bits and --mode out"
            )
        if self.mode in ("", "affine"):
            if self.group_size not in (None, 32, 64, 128):
                raise UserError(f"--group-size {self.group_size}: affine quantization has 32, 64 and 128")
            return
        bits, group_size = BITS[self.mode], DEFAULT_GROUP_SIZES[self.mode]
        if self.bits not in (None, bits) or self.group_size not in (None, group_size):
            raise UserError(f"--mode {self.mode} has {bits} bits and groups of {group_size}, no others")


def convert(
    source: str,
    target: Path,
    *,
    quantization: QuantizationOptions = QuantizationOptions(),
    dequantize: bool = False,
    dtype: str = "",
    force: bool = False,
    step: int | None = None,
    text_only: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Writes the MLX folder `target`, completely or not at all, and returns it.

    Args:
        source: a folder or Hub name that mlx-lm knows, or a folder of nanochat's checkpoints.
        target: the new folder; an existing one needs `force`.
        quantization: packing of the weights, by mlx-lm.
        dequantize: unpack a quantized model.
        dtype: "float32", "float16" or "bfloat16"; "" keeps the source's.
        step: which nanochat checkpoint; None: the last.
        text_only: convert only the language part of a vision-language model.
        trust_remote_code: run code that comes with the model.

    Raises UserError for missing or unknown inputs, and for a target that cannot be written.
    """
    quantization.check()
    if dequantize and quantization.wanted:
        raise UserError("--dequantize and quantization exclude each other")
    folder = Path(source).expanduser()
    check_target(target, force)
    if folder.exists() and target.exists():
        inside = target.resolve()
        if folder.resolve() == inside:
            raise UserError(f"{target}: source and target are the same folder")
        if inside in folder.resolve().parents:
            raise UserError(f"{target}: the source {folder} lies in it; wanted another folder")
    if is_checkpoint(folder):
        if dequantize:
            raise UserError(f"{source}: nanochat's checkpoints are not quantized; leave --dequantize out")
        checkpoint = find_checkpoint(folder, step)
        with new_folder(target, replace=force) as temporary:
            convert_checkpoint(checkpoint, temporary, dtype)
            if quantization.wanted:
                _pack_folder(temporary, quantization)
        return target
    if step is not None:
        raise UserError(f"--step {step}: {source} is no folder of nanochat's checkpoints")
    path = resolve_model(source, "SOURCE")
    if tokenizer_pickle(path) is not None and (dequantize or dtype or not quantization.wanted):
        raise UserError(
            f"{source}: this is already an MLX folder of nanochat's; it can only be quantized (--bits, "
            "--mode or --recipe)"
        )
    options = _options(quantization, dequantize, dtype)
    prompt = read_prompt(path)
    with new_folder(target, replace=force) as temporary:
        if tokenizer_pickle(path) is not None:
            _copy(path, temporary)
            _pack_folder(temporary, quantization)
        elif has_vision(read_json(path / "config.json")) and not text_only:
            if quantization.recipe and quantization.group_size not in (None, 64):
                raise UserError("--recipe of a vision-language model has groups of 64, no others")
            convert_vision(path, temporary, trust_remote_code=trust_remote_code, **options)
        else:
            _by_mlx_lm(path, temporary, trust_remote_code, options)
        if prompt is not None:
            write_prompt(temporary, prompt)
        if quantization.wanted:
            _check_packed(temporary)
    return target


def _options(quantization: QuantizationOptions, dequantize: bool, dtype: str) -> dict[str, Any]:
    """The arguments that mlx-lm's converter and mlx-vlm's have in common."""
    mode = quantization.mode or "affine"
    return {
        "quantize": quantization.wanted,
        "q_group_size": quantization.group_size or DEFAULT_GROUP_SIZES[mode],
        "q_bits": quantization.bits or BITS[mode],
        "q_mode": mode,
        "dtype": dtype or None,
        "dequantize": dequantize,
        "quant_predicate": quantization.recipe or None,
    }


def _by_mlx_lm(path: Path, target: Path, trust_remote_code: bool, options: dict[str, Any]) -> None:
    import mlx_lm

    target.rmdir()  # mlx-lm creates it itself
    try:
        # stdout is for what a command has to say, and mlx-lm reports its progress there.
        with contextlib.redirect_stdout(sys.stderr), _readable(path) as source:
            mlx_lm.convert(str(source), str(target), trust_remote_code=trust_remote_code, **options)
    except OSError:
        raise
    except Exception as error:  # of mlx-lm, or of code that the model brings
        raise UserError(f"{path}: mlx-lm cannot convert it: {first_line(error)}") from error


@contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """The folder, or a folder of links to its files if config.json must be respelled for mlx-lm."""
    config = read_config(path)
    if config == read_json(path / "config.json"):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="grpo-convert-") as name:
        folder = Path(name)
        for file in path.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file.resolve())
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def _check_packed(folder: Path) -> None:
    """Raises UserError if nothing was packed: mlx-lm silently skips a layer whose width is no multiple of the
    group."""
    import mlx.core as mx

    names = [name for file in folder.glob("model*.safetensors") for name in cast(dict, mx.load(str(file)))]
    if not any(name.endswith(".scales") for name in names):
        raise UserError(_NOTHING_PACKED)


def _copy(source: Path, target: Path) -> None:
    for file in (*source.glob("model*.safetensors"), *source.glob("*.index.json"), source / "config.json"):
        shutil.copyfile(file, target / file.name)
    copy_companions(source, target)


def pack_model(
    module: nn.Module, config: dict[str, Any], quantization: QuantizationOptions
) -> tuple[nn.Module, dict]:
    """Packs a module's layers by mlx-lm, and returns the config with the quantization.

    Raises UserError if the recipe does not fit the model, or if nothing could be packed.
    """
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model

    mode = quantization.mode or "affine"
    group_size = quantization.group_size or DEFAULT_GROUP_SIZES[mode]
    predicate: Any = None  # mlx-lm's two functions disagree on its type
    if quantization.recipe:
        try:
            predicate = mixed_quant_predicate_builder(quantization.recipe, module, group_size)
        except ValueError as error:
            raise UserError(f"--recipe {quantization.recipe}: {error}") from error
    # stdout is for what a command has to say, and mlx-lm reports its progress there.
    with contextlib.redirect_stdout(sys.stderr):
        module, config = quantize_model(
            module, config, group_size, quantization.bits or BITS[mode], mode=mode, quant_predicate=predicate
        )
    if not any(hasattr(layer, "bits") for _, layer in module.named_modules()):
        raise UserError(_NOTHING_PACKED)
    return module, config


def write_weights(folder: Path, module: nn.Module, config: Mapping[str, Any]) -> None:
    """Replaces config.json and the weights in a folder; the module is emptied."""
    from mlx_lm.utils import save_model

    for file in (*folder.glob("model*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_model(folder, module, donate_model=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _pack_folder(folder: Path, quantization: QuantizationOptions) -> None:
    """Quantizes the model in a folder by mlx-lm's functions, because its command needs another tokenizer."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    module, config = load_model(folder)
    mx.eval(module.parameters())  # the file that they are read from will be replaced
    if "quantization" in config:
        raise UserError(f"{folder}: the weights are quantized already")
    module, config = pack_model(module, config, quantization)
    write_weights(folder, module, config)
