"""Renders benchmarks/results/*.json into the tables of benchmarks/README.md, between its markers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.record import RESULTS, Record, load_records, table
from runners.errors import UserError

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- results:begin {} -->", "<!-- results:end {} -->"
VERSIONS = ("python", "mlx", "mlx-lm", "grpo_fn")
NAMES = ("quickstart", "logprobs", "loss", "step")


def section(records: dict[str, Record]) -> str:
    """One benchmark's tables, a backend after the other, each with what it was measured on."""
    parts = []
    for backend, record in sorted(records.items()):
        quick = " **--quick: sizes too small to mean anything.**" if record.quick else ""
        parts += [
            f"**{backend}**, {record.date}, {_surroundings(backend, record)}.{quick}",
            "",
            table(record),
            "",
        ]
    return "\n".join(parts).strip() or "*Not measured yet.*"


def _surroundings(backend: str, record: Record) -> str:
    """Machine, versions and rates in a line."""
    found, speed = record.machine, record.rates
    words = [f"{found['cpu']} ({found['cores']} cores, {found['memory_gb']:.0f} GB)", found["system"]]
    if backend == "cpu":
        words.append(f"{found['blas']} with threads: {found['blas_threads']}")
    else:
        words.insert(0, found["device"])
    words += [f"load {found['load']:g} at the start", *(f"{name} {found[name]}" for name in VERSIONS)]
    words.append(
        f"float32 matmul {speed['matmul'] / 1e9:,.0f} GFLOP/s, exp {speed['exp'] / 1e6:,.0f} M/s, "
        f"copy {speed['copy'] / 1e9:,.1f} GB/s"
    )
    words += [f"with {name} = {value}" for name, value in record.settings.items()]
    return "; ".join(words)


def rendered(text: str, results: Path) -> str:
    """The README's text with every benchmark's tables in its place.

    Raises:
        UserError: a benchmark's markers are missing or in the wrong order, or a result cannot be read.
    """
    for name in NAMES:
        begin, end = BEGIN.format(name), END.format(name)
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise UserError(f"{README.name}: wanted {begin} and, after it, {end}")
        text = f"{head}{begin}\n{section(load_records(results / f'{name}.json'))}\n{end}{tail}"
    return text


def refresh(readme: Path, results: Path, *, write: bool = True) -> bool:
    """Bring a README up to date with a folder of results, or only look; whether it was out of date.

    Raises UserError as `rendered` does.
    """
    text = readme.read_text(encoding="utf-8")
    new = rendered(text, results)
    if write and new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text


def verdicts(results: Path) -> Iterator[str]:
    """A line for every target: PASS or MISS, benchmark, figure and value."""
    for name in NAMES:
        for backend, record in load_records(results / f"{name}.json").items():
            for figure in record.figures:
                if figure.met is not None:
                    verdict = "PASS" if figure.met else "MISS"
                    yield f"{verdict}  {name} on {backend}: {figure.name}: {figure.value:.4g} {figure.unit}"


@click.command("report")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where the README is out of date.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=RESULTS)
@click.option("--readme", type=click.Path(path_type=Path, dir_okay=False, exists=True), default=README)
def main(check: bool, results: Path, readme: Path) -> None:
    """Put the results into benchmarks/README.md, and print the verdict on every target."""
    try:
        for line in verdicts(results):
            click.echo(line)
        changed = refresh(readme, results, write=not check)
    except UserError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    if changed and check:
        click.echo(f"{readme.name} is out of date: run python -m benchmarks.report", err=True)
        sys.exit(1)
    click.echo(f"{readme} is up to date", err=True)


if __name__ == "__main__":
    main()
