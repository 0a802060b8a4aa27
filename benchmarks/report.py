"""Every target with its verdict; both READMEs and the charts brought up to date with benchmarks/results."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.evidence.pictures import redraw
from benchmarks.harness.record import RESULTS
from benchmarks.harness.report import NAMES, README, draw_chart, refresh, verdicts
from runners.errors import UserError


@click.command("report")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where the README is out of date.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--readme", type=click.Path(path_type=Path, dir_okay=False, exists=True), default=README)
def main(check: bool, results: Path, readme: Path) -> None:
    """Put the results into both READMEs, draw them, and print the verdict on every target."""
    try:
        for line in verdicts(results):
            click.echo(line)
        if not check:
            for name in NAMES:
                draw_chart(results, name, lambda text: click.echo(text, err=True))
            if results.resolve() == RESULTS:
                redraw(results / "evidence", lambda text: click.echo(text, err=True))
        changed = refresh(readme, results, write=not check)
    except UserError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    if changed and check:
        names = " and ".join(map(str, changed))
        click.echo(f"{names}: out of date: run python -m benchmarks.report", err=True)
        sys.exit(1)
    click.echo(f"{readme} is up to date", err=True)


if __name__ == "__main__":
    main()
