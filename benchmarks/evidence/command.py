"""Shared parts of the evidence commands: parallel trials, each added to the result when it ends."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.evidence import page, pictures
from benchmarks.evidence.pool import Job, Usage, side_by_side
from benchmarks.evidence.readings import RESIDENT, SECONDS, read_log
from benchmarks.harness.command import OTHER_RESULTS, Kind, benchmark, chosen_of, numbers, say
from benchmarks.harness.machine import backend
from benchmarks.harness.record import RESULTS, Figure, load_records
from runners.errors import UserError

SAME_WORK = ("jobs", "seeds", "cases", "minutes", "missing", "models", "teach", "sums", "gsm8k")
REAL_MODEL = "GRPO_REAL_MODEL"
ALL_SEEDS = "all seeds"  # begins the names of figures that are taken over the trials
EVIDENCE = RESULTS / "evidence"


@attrs.frozen(kw_only=True)
class Trial:
    """One run of a case: a process, and a function that reads its figures after it has succeeded."""

    case: str  # without ": "
    seed: int
    command: Sequence[str]
    read: Callable[[], Sequence[Figure]]
    environment: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """The first part of the names of its figures."""
        return f"{self.case}: seed {self.seed}"


@attrs.frozen(kw_only=True)
class Plan:
    """The runs that a command was called for."""

    quick: bool
    cases: Sequence[str]
    seeds: Sequence[int]
    work: Path  # a folder that is emptied at the end
    jobs: int
    until: float  # time.monotonic() at which all has to be done


Reading = Callable[[Sequence[dict[str, Any]]], Sequence[Figure]]  # of a log's lines
Prepare = Callable[..., Sequence[Trial]]
Summary = Callable[[Sequence[Figure]], Sequence[Figure]]


def evidence(
    name: str,
    *,
    cases: Sequence[str],
    quick_cases: Sequence[str],
    seeds: str,
    summary: Summary = lambda figures: (),
    packages: Sequence[str] = (),
) -> Callable[[Prepare], click.Command]:
    """Creates a command from a function `f(plan, **options) -> trials`, whose docstring is its
    help.

    Trials run in parallel. When a trial ends, its figures are written to FOLDER/NAME.json and
    replace its earlier ones; all other figures are kept. Therefore, a command can be stopped at any
    time, and continued with `--case` and `--seeds`. Failed trials are listed at the end.

    Args:
        name: the name of the result and of the module.
        cases: all cases, in the order of the tables.
        quick_cases: the cases that `--quick` runs.
        seeds: the default of `--seeds`.
        summary: computes figures over all trials from the trials' figures; their names start with
            `ALL_SEEDS`.
        packages: packages whose versions are recorded in the result, in addition to this project's.
    """

    known = [*cases, *quick_cases]
    kind = Kind(
        home=EVIDENCE,
        other=OTHER_RESULTS / "evidence",
        same_work=SAME_WORK,
        draw=_draw,
        packages=packages,
        replaced=lambda lot: (_trial_of(lot[0]), ALL_SEEDS),
        arranged=lambda figures: _arranged(figures, known, summary),
        adds=True,
    )

    def decorate(function: Prepare) -> click.Command:
        @benchmark(name, kind=kind)
        @click.option("--case", "cases", multiple=True, help="Only this one; the others' figures stay.")
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
            quick: bool, seeds: Sequence[int], jobs: int, minutes: float, missing: bool, **options: Any
        ) -> Iterator[list[Figure]]:
            out = click.get_current_context().params["out"] or EVIDENCE
            last = load_records(out / f"{name}.json").get(backend()) if missing else None
            done = {_trial_of(figure) for figure in last.figures} if last else set()
            chosen = chosen_of(options.pop("cases") or (quick_cases if quick else cases), known)
            before = signal.signal(signal.SIGTERM, _end)  # by an exception, which ends the runs as well
            with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as work:
                plan = Plan(
                    quick=quick,
                    cases=chosen,
                    seeds=seeds[:1] if quick else seeds,
                    work=Path(work),
                    # Each run takes the GPU's memory for its own.
                    jobs=jobs or (max((os.cpu_count() or 1) // 2, 1) if backend() == "cpu" else 1),
                    until=time.monotonic() + (60 * minutes or float("inf")),
                )
                try:
                    trials = function(plan, **options)
                    yield from _run_all(name, plan, [each for each in trials if each.name not in done])
                finally:
                    signal.signal(signal.SIGTERM, before)

        return run

    return decorate


def _trial_of(figure: Figure) -> str:
    return ": ".join(figure.name.split(": ")[:2])


def _arranged(figures: Sequence[Figure], cases: Sequence[str], summary: Summary) -> list[Figure]:
    """The trials' figures in the order of the cases and seeds, and the figures over all seeds."""

    def place(figure: Figure) -> tuple[int, int]:
        case, seed, _ = figure.name.split(": ", 2)
        return cases.index(case), int(seed.removeprefix("seed "))

    ordered = sorted(figures, key=place)  # stable: the figures of a trial stay in their order
    return [*ordered, *summary(ordered)]


def _draw(folder: Path, name: str, say: Callable[[str], None]) -> None:
    drawn = page.PICTURES if folder.resolve() == EVIDENCE else folder
    pictures.redraw(folder, say, names=(name,), into=drawn)


def _run_all(name: str, plan: Plan, trials: Sequence[Trial]) -> Iterator[list[Figure]]:
    """Runs the trials, and yields the figures of each when it ends. Finally raises UserError for
    failed trials.
    """
    jobs = {
        trial.name: Job(
            name=trial.name,
            command=trial.command,
            printed=plan.work / "printed" / f"{place}.txt",
            environment=trial.environment,
        )
        for place, trial in enumerate(trials)
    }
    by_name = {trial.name: trial for trial in trials}
    faults = []
    say(f"{name}: {len(trials)} runs, {plan.jobs} side by side")
    for job, outcome in side_by_side(list(jobs.values()), plan.jobs, until=plan.until):
        trial = by_name[job.name]
        try:
            if isinstance(outcome, UserError):
                raise outcome
            figures = [*trial.read(), *taken(outcome)]
        except UserError as error:
            faults.append(str(error) if job.name in str(error) else f"{job.name}: {error}")
            say(faults[-1])
            continue
        say(f"{trial.name}: {outcome.seconds:.0f} s; {', '.join(map(_words, figures[:4]))}")
        yield [attrs.evolve(figure, name=f"{trial.name}: {figure.name}") for figure in figures]
    if faults:
        raise UserError("\n".join(faults))


def taken(usage: Usage) -> list[Figure]:
    """Time and memory of a process."""
    note = f"{usage.cores} core{'s' if usage.cores > 1 else ''}"
    return [
        Figure(name=SECONDS, value=usage.seconds, unit="s", note=note),
        Figure(name=RESIDENT, value=usage.resident / 1e6, unit="MB"),
    ]


def _words(figure: Figure) -> str:
    return f"{figure.name} {figure.value:.4g} {figure.unit}".strip()


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def run_folder(plan: Plan, case: str, seed: int) -> Path:
    """The folder for a trial's files."""
    return plan.work / "runs" / re.sub("[ ,]+", "-", f"{case}-{seed}")


def run_trial(
    plan: Plan, case: str, seed: int, config: Path | str, settings: Sequence[str], read: Reading
) -> Trial:
    """`grpo run` with a config as a trial."""
    from benchmarks.quickstart import command_line

    folder = run_folder(plan, case, seed)
    place = (f"run.name={folder.name}", f"run.output_dir={folder.parent}", f"run.seed={seed}")
    words = [word for each in (*place, "log.report=false", *settings) for word in ("--set", each)]
    return Trial(
        case=case,
        seed=seed,
        command=[*command_line(), str(config), *words],
        read=lambda: read(read_log(folder)),
    )


def values(figures: Sequence[Figure], case: str, name: str) -> list[float]:
    """A figure's values for each seed of a case."""
    found = [figure for figure in figures if figure.name.startswith(f"{case}: seed ")]
    return [figure.value for figure in found if figure.name.endswith(f": {name}")]


def real_settings(plan: Plan) -> list[str]:
    """Overrides for the model in GRPO_REAL_MODEL; None, with a message, if it is not a folder."""
    folder = os.environ.get(REAL_MODEL, "embedded" if plan.quick else "")
    if not folder:
        say(f"skipped, because {REAL_MODEL} is not a folder")
        return []
    return [f"model.path={folder}", f"model.dtype={'float32' if backend() == 'cpu' else 'bfloat16'}"]
