"""Shared parts of the benchmarks' commands: --quick, --check, --out, the record and the table."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
from click.core import ParameterSource

from benchmarks.harness.machine import backend, machine, rates
from benchmarks.harness.record import EVIDENCE, RESULTS, Figure, Record, load_records, save_record, table
from benchmarks.harness.report import draw_picture, refresh
from runners.commands.base import ends_with_a_line
from runners.errors import UserError, did_you_mean
from runners.machine import startup

OTHER_RESULTS = Path("outputs") / "benchmarks"  # of --quick, and of other work
Found = Sequence[Figure] | Iterator[Sequence[Figure]]  # what a benchmark's function returns
Cases = TypeVar("Cases")
CASE = click.option("--case", "chosen", multiple=True, help="Only this one; the others' figures stay.")


def say(text: str) -> None:
    """Prints a progress message to stderr, because stdout is for the table."""
    click.echo(text, err=True)


def benchmark(
    name: str,
    *,
    parts: Sequence[str] = (),
    work: Sequence[str] | None = None,
    adds: bool = False,
    packages: Sequence[str] = (),
    arranged: Callable[[Sequence[Figure]], Sequence[Figure]] = tuple,
) -> Callable[[Callable[..., Found]], click.Command]:
    """Creates a command from a function `f(quick, **options) -> figures`, whose docstring is its
    help and whose own options are click decorators below this one.

    The command measures, writes FOLDER/NAME.json under this machine's backend, prints the table
    with the change from the previous record, and lists missed targets. If the function yields its
    figures in parts, each part is written immediately, so it is not lost if the command ends early.
    A result that belongs to benchmarks/results (without --quick and with the default work) is also
    written to the pages. The context's `obj` is the folder.

    Args:
        name: the name of the result.
        parts: options that select parts of the benchmark (each a sequence of names; empty means
            all); figures that were not measured again stay in the record. Names of figures start
            with the first option's names: "PART: ...".
        work: options that change what is measured; None means all except `parts` and --repeats.
        adds: whether figures that were not measured again always stay. Such a result belongs to
            benchmarks/results/evidence, and has no floors.
        packages: packages whose versions belong to the result, besides this project's.
        arranged: converts the figures to the record's figures (see `save_record`).
    """
    home = EVIDENCE if adds else RESULTS
    other = OTHER_RESULTS / home.relative_to(RESULTS)

    def decorate(function: Callable[..., Found]) -> click.Command:
        @click.command(name, help=function.__doc__)
        @click.option("--quick", is_flag=True, help="Use small sizes, to show that it works.")
        @click.option("--check", is_flag=True, help="Exit with 1 if a target is missed.")
        @click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            help=f"Folder of the result [{other}]."
            if work == ()
            else f"Folder of the result [benchmarks/{home.relative_to(RESULTS.parent)}; with "
            f"--quick or other work {other}].",
        )
        @ends_with_a_line
        @functools.wraps(function)
        def run(quick: bool, check: bool, out: Path | None, **options: Any) -> None:
            usual = [key for key in options if key not in (*parts, "repeats")]
            settings = given(usual if work is None else [key for key in work if key in options])
            folder = out or (other if quick or settings or work == () else home)
            click.get_current_context().obj = folder
            last = load_records(folder / f"{name}.json").get(backend())
            for notice in startup.prepare().notices:
                say(notice)
            surroundings = machine(packages)  # the load before this benchmark adds its own
            floors = {}
            if not adds:
                say(f"{name}: measuring the machine")
                floors = {key: rate for key, rate in attrs.asdict(rates(quick)).items() if rate}

            def save(figures: Sequence[Figure], replaced: Iterable[str] | None) -> Record:
                record = Record(
                    name=name,
                    quick=quick,
                    settings=settings,
                    machine=surroundings,
                    rates=floors,
                    figures=figures,
                )
                return save_record(folder, backend(), record, parts=replaced, arranged=arranged)[1]

            figures: list[Figure] = []
            record: Record | None = None
            with ending_by_exception():
                found = function(quick=quick, **options)
                for lot in found if isinstance(found, Iterator) else [found]:
                    if lot:
                        figures += lot
                        record = save(lot, {figure.part for figure in lot})
            if not adds and figures:  # figures that are not measured any more go
                chosen = [options[key] for key in parts if options[key]]
                replaced: Sequence[str] | None = () if chosen else None
                if chosen and chosen == [options[parts[0]]]:
                    replaced = chosen[0]
                record = save(figures, replaced)
            if record is None:
                return
            draw_picture(folder, name, say)
            if folder.resolve().is_relative_to(RESULTS):
                refresh()
            click.echo(table(record, last))
            say(f"written to {folder / name}.json under {backend()!r}")
            for figure in record.missed():
                say(f"MISS {figure.name}: {figure.value:.4g} {figure.unit}")
            if check and record.missed():
                sys.exit(1)

        return run

    return decorate


@contextlib.contextmanager
def ending_by_exception() -> Iterator[None]:
    """Lets SIGTERM raise an exception inside the block, which ends all processes as well."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
            wanted = f"expected one of {', '.join(names)}{did_you_mean(name, names)}"
            raise UserError(f"case {name!r}: {wanted}")
    return list(chosen) or names


def of_backend(quick: bool, small: Cases, on_cpu: Cases, on_gpu: Cases) -> Cases:
    """The cases for --quick, for a CPU or for a GPU."""
    if quick:
        return small
    return on_cpu if backend() == "cpu" else on_gpu


def numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    """The values of an option such as `--seeds 0,1,2`."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        example = "expected integers separated by commas, such as 0,1,2"
        raise click.BadParameter(f"{text!r}: {example}") from None
