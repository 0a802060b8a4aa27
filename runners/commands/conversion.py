"""Defines `grpo convert`, which converts models to MLX folders, and `grpo export`, which writes a
trained model as a folder or file for other programs and uploads it on request.
"""

from functools import partial
from pathlib import Path
from typing import Any

import click

from runners.commands.base import command, flag, option, refuse
from runners.commands.options import FORCE, QUANTIZE, TARGET, TRUST, echo_weights, quantization_of
from runners.errors import gigabytes
from runners.machine.terminal import echo


@command(
    "convert",
    click.argument("source"),
    TARGET,
    QUANTIZE,
    flag("--dequantize", "Unpack a quantized model."),
    option(
        "--calibrate=FILE",
        "File of prompts; layers are quantized so that their outputs on them change little.",
        default="",
    ),
    option(
        "--column", "Column with the prompts, if FILE contains rows [prompt].", default="prompt"
    ),
    option("--step", "Step of the nanochat checkpoint [the last].", int),
    flag("--text-only", "Convert only the language part of a vision-language model."),
    FORCE,
    TRUST,
    notes="""\
\b
Examples:
  grpo convert Qwen/Qwen2.5-0.5B-Instruct --out qwen-4bit --bits 4
  grpo convert ./SmolLM2-135M-Instruct --out smol-4bit --bits 4 --calibrate prompts.txt
  grpo convert meta-llama/Llama-3.2-1B --out llama-mixed --recipe mixed_3_6
  grpo convert SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2
  grpo convert ~/.cache/nanochat/chatsft_checkpoints/d20 --out nanochat-d20 --dtype bfloat16
""",
)
def convert_command(source: str, out: Path, dtype: str | None, **values: Any) -> None:
    """Convert a model to an MLX folder.

    SOURCE is a Hugging Face folder, a Hub name, a GGUF file, or a folder with nanochat's PyTorch checkpoints
    (model_*.pt, meta_*.json).
    """
    from runners.machine import startup

    startup.prepare()
    from runners.conversion.convert import convert

    convert(
        source,
        out,
        quantization=quantization_of(values),
        dequantize=values["dequantize"],
        dtype=dtype or "",
        calibrate=values["calibrate"],
        column=values["column"],
        force=values["force"],
        step=values["step"],
        text_only=values["text_only"],
        trust_remote_code=values["trust_remote_code"],
        note=partial(echo, err=True),
    )
    echo_weights(out)


@command(
    "export",
    click.argument("source", metavar="RUN_OR_FOLDER"),
    option(
        "--out=DIR", "Write a new folder for mlx-lm and transformers.", click.Path(path_type=Path)
    ),
    QUANTIZE,
    option(
        "--gguf=FILE",
        "Write a file for llama.cpp, and a Modelfile for Ollama next to it.",
        click.Path(path_type=Path),
    ),
    option(
        "--peft=DIR",
        "Write a new folder with only the adapters, for PEFT.",
        click.Path(path_type=Path),
    ),
    option(
        "--type as kind", "Type of the weights in FILE: f16, bf16, f32, q8_0, q4_0 or q4_1 [f16]."
    ),
    option("--push as --upload-repo as push=OWNER/NAME", "Also upload DIR to the Hub.", default=""),
    flag("--private", "Make a new repository private."),
    flag("--force", "Replace DIR or FILE if it exists."),
    TRUST,
    notes="""\
\b
Examples:
  grpo export outputs/my-first --out my-model
  grpo export outputs/lora/checkpoint-200 --out my-model-4bit --bits 4
  grpo export outputs/my-first --gguf my-model.gguf --type q8_0
  grpo export outputs/lora --peft my-adapters
  grpo export outputs/my-first --out my-model --push someone/my-model
""",
)
def export_command(
    source: str, out: Path | None, gguf: Path | None, peft: Path | None, push: str, **values: Any
) -> None:
    """Write a trained model for other programs.

    RUN_OR_FOLDER is a run's folder (its final model or, without one, its newest complete checkpoint), a
    checkpoint, a folder with adapters, or any model. Adapters are merged, except with --peft. The new folder
    contains a model card with the run's config and results. Nothing is uploaded without --push.
    """
    from runners.machine import startup

    startup.prepare()
    quantization = quantization_of(values)
    targets = [path for path in (out, gguf, peft) if path is not None]
    packing = quantization.wanted or quantization.group_size or values["dtype"]
    refuse(
        (len(targets) != 1, "expected one of --out DIR, --gguf FILE and --peft DIR"),
        (
            out is None and (push or packing),
            "--push, --bits, --mode, --recipe, --group-size and --dtype require --out DIR",
        ),
        (values["private"] and not push, "--private requires --push"),
        (values["kind"] and gguf is None, "--type requires --gguf"),
    )
    from runners.conversion.export import (
        export_folder,
        export_gguf,
        export_peft,
        open_source,
        upload,
    )
    from runners.conversion.gguf.writing import check_gguf

    target = targets[0]
    force = values["force"]
    note = partial(echo, err=True)
    kind = values["kind"] or "f16"
    if gguf is not None:
        check_gguf(kind)
    if peft is not None:
        export_peft(source, peft, force=force, note=note)
        echo_weights(peft)
        return
    opened = open_source(
        source, target, force=force, trust_remote_code=values["trust_remote_code"], note=note
    )
    if gguf is not None:
        modelfile = export_gguf(opened, gguf, kind, force=force)
        size = gigabytes(gguf.stat().st_size)
        echo(f"{gguf}: {size}; import it with `ollama create NAME -f {modelfile}`")
        return
    export_folder(
        opened,
        target,
        quantization=quantization,
        dtype=values["dtype"] or "",
        force=force,
        title=push,
        online=bool(push),
    )
    echo_weights(target)
    if push:
        echo(f"uploaded: {upload(target, push, private=values['private'])}")
