"""Prints every target with its verdict, and updates all pages and charts from benchmarks/results."""

from __future__ import annotations

import sys

import click

from benchmarks.evidence.pictures import redraw
from benchmarks.harness.record import RESULTS
from benchmarks.harness.report import NAMES, draw_chart, refresh, verdicts
from runners.errors import UserError


@click.command("report")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page is out of date.")
def main(check: bool) -> None:
    """Write the results to the pages, draw them, and print the verdict on every target."""
    try:
        for line in verdicts(RESULTS):
            click.echo(line)
        if not check:
            for name in NAMES:
                draw_chart(RESULTS, name, lambda text: click.echo(text, err=True))
            redraw(RESULTS / "evidence", lambda text: click.echo(text, err=True))
        changed = refresh(write=not check)
    except UserError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    if changed and check:
        click.echo(f"{', '.join(map(str, changed))}: out of date: run python -m benchmarks.report", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
