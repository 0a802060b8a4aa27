"""`grpo convert`: other people's models to MLX folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from runners.commands.base import command, flag, option
from runners.commands.options import FORCE, QUANTIZE, TARGET, TRUST, echo_weights, quantization_of
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
