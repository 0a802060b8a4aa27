"""Prints every target with its verdict, and updates all pages and charts from benchmarks/results."""

from __future__ import annotations

import sys

import click

from benchmarks.evidence import NAMES as COMPARISONS
from benchmarks.harness.command import say
from benchmarks.harness.record import EVIDENCE, RESULTS
from benchmarks.harness.report import NAMES, draw_picture, refresh, verdicts
from runners.commands.base import ends_with_a_line


@click.command("report")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a page is out of date.")
@ends_with_a_line
def main(check: bool) -> None:
    """Write the results to the pages, draw them, and print the verdict on every target."""
    for line in verdicts(RESULTS):
        click.echo(line)
    if not check:
        for name in NAMES:
            draw_picture(RESULTS, name, say)
        for name in (*COMPARISONS, "gsm8k"):
            draw_picture(EVIDENCE, name, say)
    changed = refresh(write=not check)
    if changed and check:
        say(f"{', '.join(map(str, changed))}: out of date: run python -m benchmarks.report")
        sys.exit(1)


if __name__ == "__main__":
    main()
