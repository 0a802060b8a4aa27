"""What the commands of evidence have in common: trials, side by side, each put into the result as it ends."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.evidence import page, pictures
from benchmarks.evidence.pool import Job, Usage, side_by_side
from benchmarks.evidence.readings import RESIDENT, SECONDS
from benchmarks.harness.command import OTHER_RESULTS, given, say
from benchmarks.harness.machine import backend, machine, rates
from benchmarks.harness.record import (
    RESULTS,
    Figure,
    Record,
    alike,
    load_records,
    make_record,
    save_record,
    table,
)
from benchmarks.harness.report import refresh
from runners.errors import UserError
from runners.machine import startup

SAME_WORK = (
    "jobs",
    "seeds",
    "cases",
    "minutes",
    "models",
    "teach",
    "sums",
    "gsm8k",
)  # options that do not change a trial
ALL_SEEDS = "all seeds"  # begins the names of figures that are taken over the trials
EVIDENCE = RESULTS / "evidence"


@attrs.frozen(kw_only=True)
class Trial:
    """One run of a case: a process, and what reads its figures once it has ended well."""

    case: str  # without ": "
    seed: int
    command: Sequence[str]
    read: Callable[[], Sequence[Figure]]
    environment: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """What the names of its figures begin with."""
        return f"{self.case}: seed {self.seed}"


@attrs.frozen(kw_only=True)
class Plan:
    """What a command is asked to run."""

    quick: bool
    cases: Sequence[str]
    seeds: Sequence[int]
    work: Path  # a folder that is emptied at the end
    jobs: int
    until: float  # time.monotonic() at which all has to be done


Prepare = Callable[..., Sequence[Trial]]
Summary = Callable[[Sequence[Figure]], Sequence[Figure]]


def evidence(
    name: str,
    *,
    cases: Sequence[str],
    quick_cases: Sequence[str],
    seeds: str,
    summary: Summary,
    packages: Sequence[str] = (),
) -> Callable[[Prepare], click.Command]:
    """Makes a command of a function `f(plan, **options) -> trials`, whose docstring is its help.

    Trials run side by side. The figures of each go into FOLDER/NAME.json as soon as it has ended, in place of
    those that the same trial had there; the others stay. So a command can be ended at any time, and gone on
    with by `--case` and `--seeds`. A trial that fails is named at the end, with exit code 1.

    Args:
        name: of the result and of the module.
        cases: that there are, in the order of the tables.
        quick_cases: those that `--quick` runs.
        seeds: the default of `--seeds`.
        summary: figures over all trials, from theirs; the names begin with `ALL_SEEDS`.
        packages: whose versions belong to the result, besides this project's.
    """

    def decorate(function: Prepare) -> click.Command:
        @click.command(name, help=function.__doc__)
        @click.option("--quick", is_flag=True, help="Tiny runs: shows that the command works.")
        @click.option("--check", is_flag=True, help="Exit with 1 where a target is missed.")
        @click.option("--case", "cases", multiple=True, help="Only this one; the others' figures stay.")
        @click.option("--seeds", default=seeds, show_default=True, callback=_numbers, help="With commas.")
        @click.option(
            "--jobs",
            type=click.IntRange(0),
            default=0,
            help="Runs side by side [0: 2 cores each; on a GPU 1].",
        )
        @click.option("--minutes", type=click.FloatRange(0), default=0.0, help="Stop after these [0: never].")
        @click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            help=f"Folder of the result [{_short(EVIDENCE)}; with --quick {OTHER_RESULTS / 'evidence'}].",
        )
        @functools.wraps(function)
        def run(
            quick: bool,
            check: bool,
            seeds: Sequence[int],
            jobs: int,
            minutes: float,
            out: Path | None,
            **options: Any,
        ) -> None:
            chosen = options.pop("cases") or (quick_cases if quick else cases)
            settings = given(options, same_work=SAME_WORK)
            folder = out or (OTHER_RESULTS / "evidence" if quick or settings else EVIDENCE)
            work = Path(tempfile.mkdtemp(prefix=f"{name}-"))
            before = signal.signal(signal.SIGTERM, _end)  # by an exception, which ends the runs as well
            try:
                unknown = [case for case in chosen if case not in {*cases, *quick_cases}]
                if unknown:
                    raise UserError(f"case {unknown[0]!r}: wanted one of {', '.join(cases)}")
                load_records(folder / f"{name}.json")  # before the minutes of running
                for notice in startup.prepare().notices:
                    say(notice)
                result = _Result(name, folder, quick, settings, packages, (*cases, *quick_cases), summary)
                plan = Plan(
                    quick=quick,
                    cases=chosen,
                    seeds=seeds[:1] if quick else seeds,
                    work=work,
                    # Each run takes the GPU's memory for its own.
                    jobs=jobs or (max((os.cpu_count() or 1) // 2, 1) if backend() == "cpu" else 1),
                    until=time.monotonic() + (60 * minutes or float("inf")),
                )
                trials = function(plan, **options)
                faults = _run_all(plan, trials, result)
                drawn = page.PICTURES if folder.resolve() == EVIDENCE else folder
                pictures.redraw(folder, say, names=(name,), into=drawn)
                if folder.resolve() == EVIDENCE:
                    refresh()
            except UserError as error:
                say(str(error))
                sys.exit(2)
            finally:
                signal.signal(signal.SIGTERM, before)
                shutil.rmtree(work, ignore_errors=True)
            for fault in faults:
                say(fault)
            record = result.record
            if record is not None:
                click.echo(table(record))
                say(f"written to {folder / name}.json under {backend()!r}")
                for figure in record.missed():
                    say(f"MISS {figure.name}: {figure.value:.4g} {figure.unit}")
            if faults or (check and record is not None and record.missed()):
                sys.exit(1)

        return run

    return decorate


def _run_all(plan: Plan, trials: Sequence[Trial], result: _Result) -> list[str]:
    """Runs the trials, each into the result; what went wrong with those that did not end well."""
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
    say(f"{result.name}: {len(trials)} runs, {plan.jobs} side by side")
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
        result.add(trial, figures)
        say(f"{trial.name}: {outcome.seconds:.0f} s; {', '.join(map(_words, figures[:4]))}")
    return faults


def taken(usage: Usage) -> list[Figure]:
    """Time and memory of a process."""
    note = f"{usage.cores} core{'s' if usage.cores > 1 else ''}"
    return [
        Figure(name=SECONDS, value=usage.seconds, unit="s", note=note),
        Figure(name=RESIDENT, value=usage.resident / 1e6, unit="MB"),
    ]


def _words(figure: Figure) -> str:
    return f"{figure.name} {figure.value:.4g} {figure.unit}".strip()


class _Result:
    """A result file that grows by a trial at a time."""

    def __init__(
        self,
        name: str,
        folder: Path,
        quick: bool,
        settings: Mapping[str, str],
        packages: Sequence[str],
        cases: Sequence[str],
        summary: Summary,
    ) -> None:
        self.name, self._folder, self._quick, self._settings = name, folder, quick, settings
        self._cases, self._summary = list(cases), summary
        self._machine = {**machine(), **{package: _version(package) for package in packages}}
        self._rates = {key: rate for key, rate in attrs.asdict(rates(quick)).items() if rate}
        self.record: Record | None = None

    def add(self, trial: Trial, figures: Sequence[Figure]) -> None:
        """Puts a trial's figures into the file, in place of its old ones, and the summary in order again."""
        new = [attrs.evolve(figure, name=f"{trial.name}: {figure.name}") for figure in figures]
        record = self._made(new)
        last = load_records(self._folder / f"{self.name}.json").get(backend())
        if last is not None and alike(last, record):
            gone = (f"{trial.name}: ", f"{ALL_SEEDS}: ")
            new += [figure for figure in last.figures if not figure.name.startswith(gone)]
        new.sort(key=self._place)  # stable: the figures of a trial stay in their order
        record = self._made([*new, *self._summary(new)])
        save_record(self._folder, backend(), record)
        self.record = record

    def _made(self, figures: Sequence[Figure]) -> Record:
        return make_record(
            self.name,
            figures,
            quick=self._quick,
            machine=self._machine,
            rates=self._rates,
            settings=self._settings,
        )

    def _place(self, figure: Figure) -> tuple[int, int]:
        case, seed, _ = figure.name.split(": ", 2)
        return self._cases.index(case), int(seed.removeprefix("seed "))


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: wanted whole numbers with commas between, such as 0,1,2"
        ) from None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _short(path: Path) -> Path:
    return path.relative_to(RESULTS.parents[1])


def run_command(config: Path | str, work: Path, name: str, settings: Sequence[str]) -> list[str]:
    """`grpo run` with a config, into work/name; `run_folder` is where its log is."""
    from benchmarks.quickstart import command_line

    all_settings = [f"run.name={name}", f"run.output_dir={work / 'runs'}", "log.report=false", *settings]
    return [*command_line(), str(config), *(word for s in all_settings for word in ("--set", s))]


def run_folder(work: Path, name: str) -> Path:
    """Where a run of `run_command` leaves what it writes."""
    return work / "runs" / name
