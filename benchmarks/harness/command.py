"""Shared parts of the benchmarks' commands: --quick, --check, --out, the record and the table."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource

from benchmarks.harness.machine import backend, machine, rates
from benchmarks.harness.record import (
    RESULTS,
    Arranged,
    Figure,
    Measured,
    Record,
    load_records,
    make_record,
    save_record,
    table,
)
from benchmarks.harness.report import draw_chart, refresh
from runners.errors import UserError, did_you_mean
from runners.machine import startup

OTHER_RESULTS = Path("outputs") / "benchmarks"  # of measurements that are not the benchmark's own


def say(text: str) -> None:
    """Prints a progress message to stderr, because stdout is for the table."""
    click.echo(text, err=True)


Found = Sequence[Figure] | Measured | Iterator[Sequence[Figure]]  # what a benchmark's function returns


@attrs.frozen(kw_only=True)
class Kind:
    """Shared settings of the commands of a folder of results."""

    home: Path  # the folder
    other: Path  # for results of --quick, or of other work
    same_work: Sequence[str]  # options that change how much is measured, and not what
    draw: Callable[[Path, str, Callable[[str], None]], None]  # makes the picture of FOLDER/NAME.json
    packages: Sequence[str] = ()  # whose versions belong to the result, besides this project's
    replaced: Callable[[Sequence[Figure]], Sequence[str]] = (
        lambda lot: ()
    )  # parts whose old figures a lot replaces
    arranged: Arranged = tuple  # see `save_record`
    adds: bool = False  # figures that are not measured again stay


BENCHMARK = Kind(home=RESULTS, other=OTHER_RESULTS, same_work=("repeats",), draw=draw_chart)


def benchmark(
    name: str, *, parts: Sequence[str] = (), kind: Kind = BENCHMARK
) -> Callable[[Callable[..., Found]], click.Command]:
    """Creates a command from a function `f(quick, **options) -> figures`, whose docstring is its
    help.

    If the function yields its figures in parts, each part is written immediately, so it is not lost
    if the command ends early.

    The command measures, writes FOLDER/NAME.json under this machine's backend, prints the table
    with the change from the previous record, and lists missed targets. A result that belongs to
    benchmarks/results (without --quick and with the default work) is also written to the README
    there. The function's own options are click decorators below this one. `parts` names the options
    that select parts of the benchmark (each a sequence of names; empty means all); figures that
    were not measured again stay in the record. Names of figures start with the first option's
    names: "PART: ...".
    """

    def decorate(function: Callable[..., Found]) -> click.Command:
        @click.command(name, help=function.__doc__)
        @click.option(
            "--quick", is_flag=True, help="Use small sizes and few repeats, to show that the command works."
        )
        @click.option("--check", is_flag=True, help="Exit with 1 if a target is missed.")
        @click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            help=f"Folder of the result [benchmarks/{kind.home.relative_to(RESULTS.parent)}; with --quick or "
            f"other work {kind.other}].",
        )
        @functools.wraps(function)
        def run(quick: bool, check: bool, out: Path | None, **options: Any) -> None:
            settings = given([key for key in options if key not in (*parts, *kind.same_work)])
            chosen = [options[key] for key in parts if options[key]]
            folder = out or (kind.other if quick or settings else kind.home)
            try:
                last = load_records(folder / f"{name}.json").get(backend())  # before the minutes of measuring
                for notice in startup.prepare().notices:
                    say(notice)
                surroundings = machine(kind.packages)  # the load before this benchmark adds its own
                say(f"{name}: measuring the machine")
                floor = {key: rate for key, rate in attrs.asdict(rates(quick)).items() if rate}

                def save(figures: Sequence[Figure], parts: Sequence[str] | None) -> Record:
                    measured = make_record(
                        name, figures, quick=quick, machine=surroundings, rates=floor, settings=settings
                    )
                    return save_record(folder, backend(), measured, parts=parts, arranged=kind.arranged)[1]

                record: Record | None = None
                found = function(quick=quick, **options)
                if isinstance(found, Iterator):
                    figures: list[Figure] = []
                    for lot in found:
                        figures += lot
                        record = save(lot, kind.replaced(lot))
                    found = figures
                found = found if isinstance(found, Measured) else Measured(found, {})
                whole: Sequence[str] | None = None  # the parts whose other figures go; None: all figures
                if chosen:
                    whole = chosen[0] if chosen == [options[parts[0]]] else ()
                if not kind.adds:
                    record = save(found.figures, whole)
                elif record is None:
                    return
                for file, text in found.files.items():
                    (folder / file).write_text(text, encoding="utf-8")
                kind.draw(folder, name, say)
                if folder.resolve().is_relative_to(kind.home):
                    refresh()
            except UserError as error:
                say(str(error))
                sys.exit(2)
            assert record is not None
            click.echo(table(record, last))
            say(f"written to {folder / name}.json under {backend()!r}")
            for figure in record.missed():
                say(f"MISS {figure.name}: {figure.value:.4g} {figure.unit}")
            if check and record.missed():
                sys.exit(1)

        return run

    return decorate


def given(names: Sequence[str]) -> dict[str, str]:
    """The options among these that are on the command line."""
    context = click.get_current_context()
    return {
        name: str(context.params[name])
        for name in names
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def chosen_of(chosen: Sequence[str], known: Iterable[str]) -> list[str]:
    """The cases of `--case`, all if there are none. Raises UserError if one is unknown."""
    names = list(known)
    for name in chosen:
        if name not in names:
            raise UserError(f"case {name!r}: expected one of {', '.join(names)}{did_you_mean(name, names)}")
    return list(chosen) or names


def numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    """The values of an option such as `--seeds 0,1,2`."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        example = "expected integers separated by commas, such as 0,1,2"
        raise click.BadParameter(f"{text!r}: {example}") from None
