"""`grpo convert`: other people's models to MLX folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import DTYPE, QUANTIZE, TRUST, echo_weights, options, quantization_of

_EXAMPLES = """\
\b
Examples:
  grpo convert Qwen/Qwen2.5-0.5B-Instruct qwen-4bit --bits 4
  grpo convert meta-llama/Llama-3.2-1B llama-mixed --recipe mixed_3_6
  grpo convert ~/.cache/nanochat/chatsft_checkpoints/d20 nanochat-d20 --dtype bfloat16
"""


@click.command("convert", context_settings=HELP, epilog=_EXAMPLES)
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@options(QUANTIZE, DTYPE)
@click.option("--dequantize", is_flag=True, help="Unpack a quantized model.")
@click.option("--step", type=int, help="Which nanochat checkpoint [the last].")
@click.option("--text-only", is_flag=True, help="Take only the language part of a vision-language model.")
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@options(TRUST)
@ends_with_a_line
def convert_command(source: str, target: Path, **values: Any) -> None:
    """Convert a model to an MLX folder.

    SOURCE is a Hugging Face folder, a name on the Hub, or a folder of nanochat's PyTorch checkpoints
    (model_*.pt, meta_*.json). TARGET is the new folder.
    """
    from runners.machine import startup

    startup.prepare()
    from runners.conversion.convert import convert

    convert(
        source,
        target,
        quantization=quantization_of(values),
        dtype=values["dtype"] or "",
        dequantize=values["dequantize"],
        force=values["force"],
        step=values["step"],
        text_only=values["text_only"],
        trust_remote_code=values["trust_remote_code"],
    )
    echo_weights(target)
