"""The commands that compare cases over several seeds: parallel runs, each added to the result when
it ends.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.evidence.readings import RESIDENT, SECONDS
from benchmarks.harness.command import CASE, benchmark, chosen_of, numbers, say
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure, load_records
from benchmarks.harness.runs import REAL_MODEL, Job, Lines, Usage, read_log, side_by_side
from runners.errors import UserError

ALL_SEEDS = "all seeds"  # begins the names of figures that are taken over the runs


@attrs.frozen(kw_only=True)
class Trial:
    """One run of a case."""

    case: str  # without ": "
    seed: int
    folder: Path  # of its log
    quick: bool

    @property
    def name(self) -> str:
        """The first part of the names of its figures."""
        return f"{self.case}: seed {self.seed}"


Prepare = Callable[..., Sequence[str]]  # the command of a trial; empty if it is skipped
Summary = Callable[[Sequence[Figure]], Sequence[Figure]]


def evidence(
    name: str,
    *,
    cases: Sequence[str],
    quick_cases: Sequence[str],
    seeds: str,
    read: Callable[[Lines], Sequence[Figure]],
    summary: Summary = lambda figures: (),
    packages: Sequence[str] = (),
) -> Callable[[Prepare], click.Command]:
    """Creates a command from a function `f(trial, **options) -> command`, whose docstring is its
    help.

    Trials run in parallel. When a trial ends, its figures are written to FOLDER/NAME.json and
    replace its earlier ones; all other figures are kept. Therefore, a command can be stopped at any
    time, and continued with `--missing`. Failed trials are listed at the end.

    Args:
        name: the name of the result and of the module.
        cases: all cases, in the order of the tables.
        quick_cases: the cases that `--quick` runs.
        seeds: the default of `--seeds`.
        read: reads the figures of a run's log.
        summary: computes figures over all trials from the trials' figures; their names start with
            `ALL_SEEDS`.
        packages: packages whose versions are recorded in the result, in addition to this project's.
    """
    known = [*cases, *quick_cases]

    def place(figure: Figure) -> tuple[int, int]:
        case, seed, _ = figure.name.split(": ", 2)
        return known.index(case), int(seed.removeprefix("seed "))

    def arranged(figures: Sequence[Figure]) -> list[Figure]:
        of_trials = [figure for figure in figures if not figure.name.startswith(ALL_SEEDS)]
        ordered = sorted(of_trials, key=place)  # stable: a trial's figures stay in their order
        return [*ordered, *summary(ordered)]

    def decorate(function: Prepare) -> click.Command:
        @benchmark(name, adds=True, work=("updates",), packages=packages, arranged=arranged)
        @CASE
        @click.option("--seeds", default=seeds, show_default=True, callback=numbers, help="With commas.")
        @click.option(
            "--jobs",
            type=click.IntRange(0),
            default=0,
            help="Number of parallel runs [0: 2 cores each; on a GPU 1].",
        )
        @click.option("--minutes", type=click.FloatRange(0), default=0.0, help="Stop after these [0: never].")
        @click.option("--missing", is_flag=True, help="Only runs that the result lacks.")
        @functools.wraps(function)
        def run(
            quick: bool,
            chosen: Sequence[str],
            seeds: Sequence[int],
            jobs: int,
            minutes: float,
            missing: bool,
            **options: Any,
        ) -> Iterator[list[Figure]]:
            file = click.get_current_context().obj / f"{name}.json"
            last = load_records(file).get(backend()) if missing else None
            done = {figure.part for figure in last.figures} if last else set()
            wanted = chosen_of(chosen or (quick_cases if quick else cases), known)
            until = time.monotonic() + (60 * minutes or float("inf"))
            # Each run takes the GPU's memory for its own.
            jobs = jobs or (max((os.cpu_count() or 1) // 2, 1) if backend() == "cpu" else 1)
            with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as work:
                trials: dict[str, tuple[Trial, Job]] = {}
                for case, seed in itertools.product(wanted, seeds[:1] if quick else seeds):
                    folder = Path(work) / "runs" / re.sub("[ ,]+", "-", f"{case}-{seed}")
                    trial = Trial(case=case, seed=seed, folder=folder, quick=quick)
                    folder.parent.mkdir(exist_ok=True)
                    command = [] if trial.name in done else function(trial, **options)
                    printed = Path(work) / "printed" / f"{folder.name}.txt"
                    if command:
                        job = Job(name=trial.name, command=command, printed=printed, until=until)
                        trials[trial.name] = (trial, job)
                yield from _run_all(trials, jobs, read)

        return run

    return decorate


def _run_all(
    trials: dict[str, tuple[Trial, Job]], number: int, read: Callable[[Lines], Sequence[Figure]]
) -> Iterator[list[Figure]]:
    """Runs the trials, and yields the figures of each when it ends. Finally raises UserError for
    failed trials.
    """
    faults = []
    say(f"{len(trials)} runs, {number} side by side")
    for job, outcome in side_by_side([job for _, job in trials.values()], number):
        try:
            if isinstance(outcome, UserError):
                raise outcome
            figures = [*read(read_log(trials[job.name][0].folder)), *taken(outcome)]
        except UserError as error:
            faults.append(str(error) if job.name in str(error) else f"{job.name}: {error}")
            say(faults[-1])
            continue
        words = [f"{each.name} {each.value:.4g} {each.unit}".strip() for each in figures[:4]]
        say(f"{job.name}: {outcome.seconds:.0f} s; {', '.join(words)}")
        yield [attrs.evolve(figure, name=f"{job.name}: {figure.name}") for figure in figures]
    if faults:
        raise UserError("\n".join(faults))


def taken(usage: Usage) -> list[Figure]:
    """Time and memory of a process."""
    note = f"{usage.cores} core{'s' if usage.cores > 1 else ''}"
    return [Figure(SECONDS, usage.seconds, "s", note=note), Figure(RESIDENT, usage.resident / 1e6, "MB")]


def values(figures: Sequence[Figure], case: str, name: str) -> list[float]:
    """A figure's values for each seed of a case."""
    found = [figure for figure in figures if figure.name.startswith(f"{case}: seed ")]
    return [figure.value for figure in found if figure.name.endswith(f": {name}")]


def real_settings(quick: bool) -> list[str]:
    """Overrides for the model in GRPO_REAL_MODEL; none, with a message, if it is not a folder."""
    folder = os.environ.get(REAL_MODEL, "embedded" if quick else "")
    if not folder:
        say(f"skipped, because {REAL_MODEL} is not a folder")
        return []
    return model_settings(folder)


def model_settings(folder: str) -> list[str]:
    """Overrides for a model in the dtype of this backend."""
    return [f"model.path={folder}", f"model.dtype={'float32' if backend() == 'cpu' else 'bfloat16'}"]
