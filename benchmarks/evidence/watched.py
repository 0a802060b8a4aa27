"""Commands that make single runs, whose figures are written while they run: `gsm8k`, `programs` and
`rates`.

A run is a process on one GPU with its own folder. Its log is read every second, and the known
figures are written to OUT/NAME.json: first the scores before training, then curves, then the last
scores.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.evidence.command import model_settings
from benchmarks.evidence.readings import SECONDS
from benchmarks.harness.command import OTHER_RESULTS, benchmark, say
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import METRICS, Job, Lines, log_lines, placed, run_command, running
from runners.errors import UserError

TO_EVALUATE = 45.0  # seconds that the evaluation after training and the final model may take
TO_SAVE = 20.0  # seconds between a signal and the end of a process that ignores it
BETWEEN_LOOKS = 1.0  # seconds
RATES = {"full": 2e-6, "lora": 1e-4}  # learning rates
OPTIONS = (
    click.option("--work", type=click.Path(path_type=Path), help="Folder for runs and models [OUT/runs]."),
    click.option("--model", required=True, help="The model's folder."),
    click.option(
        "--data",
        required=True,
        type=click.Path(path_type=Path, exists=True),
        help="Folder with train.jsonl and test.jsonl; for programs also humaneval.jsonl.",
    ),
    click.option("--seed", default=0, show_default=True),
    click.option(
        "--minutes", default=8.5, show_default=True, help="Training stops in time for the last scores."
    ),
    click.option("--set", "more", multiple=True, help="SECTION.KEY=VALUE, an override of the config."),
    click.option(
        "--resume", is_flag=True, help="Resume from the run's last checkpoint (--set checkpoint.every=…)."
    ),
)
TUNE = click.option("--tune", type=click.Choice(list(RATES)), default="full", show_default=True)
RATE = click.option("--rate", type=float, help=f"Learning rate {RATES}.")


def updates(default: int) -> Callable[..., Any]:
    """The option `--updates`."""
    meaning = "Number of updates; the learning rate falls to 0 over them."
    return click.option("--updates", default=default, show_default=True, help=meaning)


def every(default: int) -> Callable[..., Any]:
    """The option `--every`."""
    meaning = "Number of updates between evaluations."
    return click.option("--every", default=default, show_default=True, help=meaning)


@attrs.frozen(kw_only=True)
class Call:
    """The options that these commands have in common."""

    quick: bool
    work: Path | None
    model: str
    data: Path
    seed: int
    minutes: float
    more: tuple[str, ...]
    resume: bool

    def folder(self, name: str) -> Path:
        """The folder of a run of this name."""
        place = self.work
        if place is None:
            out = click.get_current_context().params["out"] or OTHER_RESULTS / "evidence"
            place = out / "runs"
        plain = name.replace(", ", "-").replace(" ", "-")
        return place.resolve() / f"{plain}-{self.seed}"

    def settings(self, folder: Path, updates: int, settings: Sequence[str]) -> list[str]:
        """All overrides of the config of a run in this folder, with those of --set last."""
        return [
            *model_settings(self.model),
            f"data.source={self.data.resolve()}",
            *placed(folder, self.seed),
            f"optim.max_steps={2 if self.quick else updates}",
            *settings,
            *self.more,
        ]

    def stopping(self) -> str:
        """The setting that ends training early enough for the final evaluation."""
        seconds = max(60 * self.minutes - TO_EVALUATE, 1.0)
        return f'stop.when=["time/elapsed >= {seconds:.0f}"]'

    def command(self, config: Path, settings: Sequence[str]) -> list[str]:
        """The command of a run."""
        return run_command(config, settings, "--resume" if self.resume else "--overwrite")


def single_runs(name: str, packages: Sequence[str] = ()) -> Callable[..., click.Command]:
    """Creates a command from a function `f(call, **options) -> figures`."""

    def decorate(function: Callable[..., Iterator[list[Figure]]]) -> click.Command:
        @functools.wraps(function)
        def run(**options: Any) -> Iterator[list[Figure]]:
            call = Call(**{field.name: options.pop(field.name) for field in attrs.fields(Call)})
            yield from function(call, **options)

        wrapped: Any = run
        for option in reversed(OPTIONS):
            wrapped = option(wrapped)
        return benchmark(name, adds=True, work=(), packages=packages)(wrapped)

    return decorate


def watch(
    title: str,
    command: Sequence[str],
    folder: Path,
    read: Callable[[Lines], Sequence[Figure]],
    *,
    minutes: float,
) -> Iterator[list[Figure]]:
    """Starts a run, and yields its figures again and again while it runs, with `title` in their names.
    The log and the output are kept next to the result.

    Args:
        title: "CASE: seed N".
        command: the run's command.
        folder: the folder of its log.
        read: reads the figures of a log that may have only a few lines yet.
        minutes: time limit after which the process is ended.

    Raises:
        UserError: the process failed or exceeded the time limit.
    """
    out: Path = click.get_current_context().obj
    begun = time.monotonic()
    looked = begun
    until = begun + 60 * minutes
    printed = out / f"{folder.name}.txt"
    steps = running(Job(name=title, command=command, printed=printed, until=until, grace=TO_SAVE))
    fault: UserError | None = None
    known = 0

    def found(lines: Lines) -> list[Figure]:
        if lines:
            shutil.copy(folder / METRICS, out / f"{folder.name}.jsonl")
        return [attrs.evolve(each, name=f"{title}: {each.name}") for each in read(lines)]

    while True:
        try:
            next(steps)
        except StopIteration:
            break
        except UserError as error:
            fault = error
            break
        if time.monotonic() - looked < BETWEEN_LOOKS:
            continue
        looked = time.monotonic()
        lines = log_lines(folder)
        if len(lines) > known:
            known = len(lines)
            yield found(lines)
    figures = found(log_lines(folder))
    if fault is None:
        figures.append(Figure(f"{title}: {SECONDS}", time.monotonic() - begun, "s"))
    yield figures
    if fault:
        raise fault
    say(f"{title}: {time.monotonic() - begun:.0f} s")
