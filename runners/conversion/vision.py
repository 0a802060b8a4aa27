"""Converts vision-language models with mlx-vlm (extra `vlm`)."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from runners.conversion.packing import QuantizationOptions
from runners.errors import UserError, first_lines
from runners.files.json_files import read_json
from runners.images.processor import mlx_vlm_module
from runners.tokenization.prompt_settings import read_prompt, write_prompt

# Exceptions of mlx-vlm for a folder that it cannot read.
_REFUSALS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, ImportError)


def convert_vision(
    path: Path,
    target: Path,
    quantization: QuantizationOptions,
    dequantize: bool,
    dtype: str,
    trust_remote_code: bool,
) -> None:
    """Writes the MLX folder of a vision-language model with `mlx_vlm.convert`.

    Its vision part is never quantized. The folder is opened once more as a check, because mlx-vlm packs
    layers of odd sizes that it cannot read again. Raises UserError without mlx-vlm, and if mlx-vlm refuses
    the model.
    """
    mode, bits, group_size = quantization.format
    if quantization.recipe and group_size != 64:
        raise UserError("--recipe of a vision-language model has groups of 64, no others")
    named = read_json(path / "config.json").get("model_file")
    if named and not trust_remote_code:  # mlx-vlm would always run it
        raise UserError(f"{path}: config.json names code to run, {named}; --trust-remote-code lets it")
    hint = "its config.json has a vision part; --text-only converts the language part alone"
    convert, utils = (mlx_vlm_module(name, f"{path} ({hint}) needs") for name in ("convert", "utils"))
    doing = "convert it"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            convert.convert(
                str(path),
                str(target),
                trust_remote_code=trust_remote_code,
                quantize=quantization.wanted,
                q_group_size=group_size,
                q_bits=bits,
                q_mode=mode,
                dtype=dtype or None,
                dequantize=dequantize,
                quant_predicate=quantization.recipe or None,
            )
        doing = "open what it made of it"
        utils.load_model(target, lazy=True, trust_remote_code=trust_remote_code)
    except _REFUSALS as error:
        raise UserError(f"{path}: mlx-vlm cannot {doing}: {first_lines(str(error))}") from error
    if (prompt := read_prompt(path)) is not None:
        write_prompt(target, prompt)
