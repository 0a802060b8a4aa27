"""`grpo export`: a trained model as a folder or a file for others, and to the Hub if asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import (
    QUANTIZE,
    TRUST,
    echo_weights,
    flag,
    option,
    options,
    quantization_of,
)
from runners.errors import UserError, gigabytes
from runners.machine.terminal import echo

_EXAMPLES = """\
\b
Examples:
  grpo export outputs/my-first --out my-model
  grpo export outputs/lora/checkpoint-200 --out my-model-4bit --bits 4
  grpo export outputs/my-first --gguf my-model.gguf --type q8_0
  grpo export outputs/my-first --out my-model --upload-repo someone/my-model
"""


@click.command("export", context_settings=HELP, epilog=_EXAMPLES)
@click.argument("source", metavar="RUN_OR_FOLDER")
@options(
    option("--out=DIR", "A new folder for mlx-lm and transformers.", click.Path(path_type=Path)),
    QUANTIZE,
    option("--gguf=FILE", "A file for llama.cpp, and Ollama's Modelfile beside it.", click.Path(path_type=Path)),
    option("--type as kind", "Of the weights in FILE: f16, bf16, f32, q8_0, q4_0 or q4_1 [f16]."),
    option("--upload-repo=OWNER/NAME", "Upload DIR to the Hub as well.", default=""),
    flag("--private", "Make a new repository private."),
    flag("--force", "Replace DIR or FILE if it exists."),
    TRUST,
)
@ends_with_a_line
def export_command(
    source: str, out: Path | None, gguf: Path | None, kind: str | None, upload_repo: str, private: bool, **values: Any
) -> None:
    """Write a trained model for others: a folder, or one file.

    RUN_OR_FOLDER is a run's folder (its final model, else its newest whole checkpoint), a checkpoint, a
    folder of adapters, or any model. Adapters are fused. A folder has a model card with the run's config
    and results. Nothing is uploaded unless --upload-repo says where to.
    """
    quantization = quantization_of(values)
    target = out or gguf
    if target is None or (out and gguf):
        raise UserError("expected either --out DIR or --gguf FILE")
    if private and not upload_repo:
        raise UserError("--private without --upload-repo: nothing would be uploaded")
    if out is None and (upload_repo or quantization.wanted or quantization.group_size or values["dtype"]):
        raise UserError("without --out DIR there is no folder to upload or quantize; --type is for --gguf")
    if kind and gguf is None:
        raise UserError("--type without --gguf FILE: nothing would have that type")
    from runners.machine import startup

    startup.prepare()
    from runners.conversion.export import check_repo, export_folder, export_gguf, open_source, upload
    from runners.conversion.gguf.writing import check_gguf

    quantization.check()
    if gguf is not None:
        check_gguf(kind or "f16")
    if upload_repo:
        check_repo(upload_repo)  # before minutes of work
    opened = open_source(
        source,
        target,
        force=values["force"],
        trust_remote_code=values["trust_remote_code"],
        note=partial(echo, err=True),
    )
    if gguf is not None:
        modelfile = export_gguf(opened, gguf, kind or "f16", force=values["force"])
        echo(f"{gguf}: {gigabytes(gguf.stat().st_size)}; `ollama create NAME -f {modelfile}` takes it")
        return
    dtype = values["dtype"] or ""
    export_folder(
        opened, target, quantization=quantization, dtype=dtype, force=values["force"], title=upload_repo
    )
    echo_weights(target)
    if upload_repo:
        echo(f"uploaded: {upload(target, upload_repo, private=private)}")
