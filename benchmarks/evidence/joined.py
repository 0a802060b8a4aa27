"""`python -m benchmarks.evidence.joined NAME FOLDER…`: joins the results of several commands.

A run replaces an earlier one of the same case and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.harness.command import say
from benchmarks.harness.record import EVIDENCE, load_records, save_record
from runners.commands.base import HELP, ends_with_a_line
from runners.errors import UserError


@click.command(context_settings=HELP)
@click.argument("name")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out", type=click.Path(path_type=Path), default=EVIDENCE, help="[benchmarks/results/evidence]"
)
@ends_with_a_line
def main(name: str, folders: Sequence[Path], out: Path) -> None:
    """Join the results of NAME in FOLDERS."""
    for folder in folders:
        records = load_records(folder / f"{name}.json")
        if not records:
            raise UserError(f"{folder / name}.json: expected a result of {name}, found none")
        for backend, record in records.items():
            trials = sorted({figure.part for figure in record.figures})
            save_record(out, backend, record, parts=trials)
            say(f"{folder}: {', '.join(trials)}")


if __name__ == "__main__":
    main()
