"""`grpo export`: a trained model as a folder or a file for others, and to the Hub if asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from runners.commands.base import command, flag, option
from runners.commands.options import QUANTIZE, TRUST, echo_weights, quantization_of
from runners.errors import UserError, gigabytes
from runners.machine.terminal import echo


@command(
    "export",
    click.argument("source", metavar="RUN_OR_FOLDER"),
    option("--out=DIR", "A new folder for mlx-lm and transformers.", click.Path(path_type=Path)),
    QUANTIZE,
    option(
        "--gguf=FILE",
        "A file for llama.cpp, and Ollama's Modelfile beside it.",
        click.Path(path_type=Path),
    ),
    option(
        "--peft=DIR", "A new folder with the adapters alone, for PEFT.", click.Path(path_type=Path)
    ),
    option("--type as kind", "Of FILE's weights: f16, bf16, f32, q8_0, q4_0 or q4_1 [f16]."),
    option(
        "--push as --upload-repo as push=OWNER/NAME", "Upload DIR to the Hub as well.", default=""
    ),
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

    RUN_OR_FOLDER is a run's folder (its final model, else its newest whole checkpoint), a checkpoint, a
    folder of adapters, or any model. Adapters are fused, but for --peft. A folder has a model card with the
    run's config and results. Nothing is uploaded unless --push says where to.
    """
    from runners.machine import startup

    startup.prepare()
    quantization = quantization_of(values)
    targets = [path for path in (out, gguf, peft) if path is not None]
    if len(targets) != 1:
        raise UserError("expected one of --out DIR, --gguf FILE and --peft DIR")
    if out is None and (push or quantization.wanted or quantization.group_size or values["dtype"]):
        raise UserError(
            "without --out DIR there is no folder to upload or quantize; --type is for --gguf"
        )
    if (values["private"] and not push) or (values["kind"] and gguf is None):
        raise UserError("--private is for --push, and --type for --gguf: nothing would come of it")
    from runners.conversion.export import (
        export_folder,
        export_gguf,
        export_peft,
        open_source,
        upload,
    )
    from runners.conversion.gguf.writing import check_gguf

    force = values["force"]
    note = partial(echo, err=True)
    kind = values["kind"] or "f16"
    if gguf is not None:
        check_gguf(kind)
    if peft is not None:
        export_peft(source, peft, force=force, note=note)
        echo_weights(peft)
        return
    trust = values["trust_remote_code"]
    opened = open_source(source, targets[0], force=force, trust_remote_code=trust, note=note)
    if gguf is not None:
        modelfile = export_gguf(opened, gguf, kind, force=force)
        echo(
            f"{gguf}: {gigabytes(gguf.stat().st_size)}; `ollama create NAME -f {modelfile}` takes "
            "it"
        )
        return
    dtype = values["dtype"] or ""
    export_folder(
        opened,
        targets[0],
        quantization=quantization,
        dtype=dtype,
        force=force,
        title=push,
        online=bool(push),
    )
    echo_weights(targets[0])
    if push:
        echo(f"uploaded: {upload(targets[0], push, private=values['private'])}")
