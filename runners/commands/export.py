"""`grpo export`: a trained model as a folder for others, and to the Hub if asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from runners.commands.base import HELP, ends_with_a_line
from runners.commands.options import (
    FORCE,
    QUANTIZE,
    TARGET,
    TRUST,
    echo_weights,
    flag,
    option,
    options,
    quantization_of,
)
from runners.errors import UserError
from runners.machine.terminal import echo

_EXAMPLES = """\
\b
Examples:
  grpo export outputs/my-first --out my-model
  grpo export outputs/lora/checkpoint-200 --out my-model-4bit --bits 4
  grpo export outputs/my-first --out my-model --upload-repo someone/my-model
"""


@click.command("export", context_settings=HELP, epilog=_EXAMPLES)
@click.argument("source", metavar="RUN_OR_FOLDER")
@options(
    TARGET,
    QUANTIZE,
    option("--upload-repo=OWNER/NAME", "Upload the folder to the Hub as well.", default=""),
    flag("--private", "Make a new repository private."),
    FORCE,
    TRUST,
)
@ends_with_a_line
def export_command(source: str, out: Path, upload_repo: str, private: bool, **values: Any) -> None:
    """Write a trained model to a folder for others.

    RUN_OR_FOLDER is a run's folder (its final model, else its newest whole checkpoint), a checkpoint, a
    folder of adapters, or any model. Adapters are fused, and a model card is written with the run's config
    and results. Nothing is uploaded unless --upload-repo says where to.
    """
    if private and not upload_repo:
        raise UserError("--private without --upload-repo: nothing would be uploaded")
    from runners.machine import startup

    startup.prepare()
    from runners.conversion.export import check_repo, export, upload

    if upload_repo:
        check_repo(upload_repo)  # before minutes of work
    export(
        source,
        out,
        quantization=quantization_of(values),
        dtype=values["dtype"] or "",
        force=values["force"],
        title=upload_repo,
        trust_remote_code=values["trust_remote_code"],
        note=partial(echo, err=True),
    )
    echo_weights(out)
    if upload_repo:
        echo(f"uploaded: {upload(out, upload_repo, private=private)}")
