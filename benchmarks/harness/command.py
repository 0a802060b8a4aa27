"""What the benchmarks' command lines have in common: --quick, --check, --out, the record and the table."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource

from benchmarks.harness.machine import backend, machine, rates
from benchmarks.harness.record import (
    RESULTS,
    Figure,
    Measured,
    Record,
    load_records,
    make_record,
    save_record,
    table,
)
from benchmarks.harness.report import draw_chart, refresh
from runners.errors import UserError
from runners.machine import startup

SAME_WORK = ("repeats", "sweep")  # options that change how much is measured, and not what
OTHER_RESULTS = Path("outputs") / "benchmarks"  # of measurements that are not the benchmark's own


def say(text: str) -> None:
    """A line about what goes on, on stderr: stdout is for the table."""
    click.echo(text, err=True)


Found = Sequence[Figure] | Measured | Iterator[Sequence[Figure]]  # what a benchmark's function returns


def benchmark(name: str, *, parts: Sequence[str] = ()) -> Callable[[Callable[..., Found]], click.Command]:
    """Makes a command of a function `f(quick, **options) -> figures`, whose docstring is its help.

    A function that yields its figures, some at a time, has each lot written at once: what ends the command
    early does not lose them.

    The command measures, writes FOLDER/NAME.json under this machine's backend, prints the table with the
    change from the record that was there, and names the targets that are missed. A result that belongs to
    benchmarks/results (neither --quick, nor other work than the default) goes into the README there as well.
    Options of the function's own are click decorators below this one. `parts` names those that take some of
    the benchmark's parts (each a sequence of names; empty: all): what was not measured again stays in the
    record. The first option's names begin the figures, "PART: ...".
    """

    def decorate(function: Callable[..., Found]) -> click.Command:
        @click.command(name, help=function.__doc__)
        @click.option(
            "--quick", is_flag=True, help="Small sizes, few repeats: shows that it works, not how fast."
        )
        @click.option("--check", is_flag=True, help="Exit with 1 where a target is missed.")
        @click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            help=f"Folder of the result [benchmarks/results; with --quick or other work {OTHER_RESULTS}].",
        )
        @functools.wraps(function)
        def run(quick: bool, check: bool, out: Path | None, **options: Any) -> None:
            settings = given({key: value for key, value in options.items() if key not in parts})
            chosen = [options[key] for key in parts if options[key]]
            folder = out or (OTHER_RESULTS if quick or settings else RESULTS)
            try:
                last = load_records(folder / f"{name}.json").get(backend())  # before the minutes of measuring
                for notice in startup.prepare().notices:
                    say(notice)
                surroundings = machine()  # the load before this benchmark adds its own
                say(f"{name}: measuring the machine")
                floor = {key: rate for key, rate in attrs.asdict(rates(quick)).items() if rate}

                def save(figures: Sequence[Figure], parts: Sequence[str] | None) -> Record:
                    measured = make_record(
                        name, figures, quick=quick, machine=surroundings, rates=floor, settings=settings
                    )
                    return save_record(folder, backend(), measured, parts=parts)[1]

                found = function(quick=quick, **options)
                if isinstance(found, Iterator):
                    figures: list[Figure] = []
                    for lot in found:
                        figures += lot
                        save(lot, ())
                    found = figures
                found = found if isinstance(found, Measured) else Measured(found, {})
                whole: Sequence[str] | None = None  # the parts whose other figures go; None: all figures
                if chosen:
                    whole = chosen[0] if chosen == [options[parts[0]]] else ()
                record = save(found.figures, whole)
                for file, text in found.files.items():
                    (folder / file).write_text(text, encoding="utf-8")
                draw_chart(folder, name, say)
                if folder.resolve() == RESULTS:
                    refresh()
            except UserError as error:
                say(str(error))
                sys.exit(2)
            click.echo(table(record, last))
            say(f"written to {folder / name}.json under {backend()!r}")
            for figure in record.missed():
                say(f"MISS {figure.name}: {figure.value:.4g} {figure.unit}")
            if check and record.missed():
                sys.exit(1)

        return run

    return decorate


def given(options: dict[str, Any], same_work: Sequence[str] = SAME_WORK) -> dict[str, str]:
    """The options given on the command line that make a result another measurement."""
    context = click.get_current_context()
    kept = [name for name in options if name not in same_work]
    return {
        name: str(options[name])
        for name in kept
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
