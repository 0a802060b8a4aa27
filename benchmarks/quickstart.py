"""How long does a quickstart take from command to end, and how much does it learn?

Each seed is a separate process, timed from the command to its end, including imports, tracing,
evaluations and the final model. Exact match is greedy, on held-out problems, and is read from the
run's log.

**What limits it.** Its 100 steps: `grpo bench quickstart` measures their parts.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from benchmarks.evidence.readings import read_log
from benchmarks.harness.command import benchmark, numbers, say
from benchmarks.harness.headlines import TRANSCRIPT
from benchmarks.harness.record import Figure, Measured
from runners.errors import UserError

SECONDS_TARGET = 120.0
TARGETS = {  # of each preset: per cent exact match on held-out problems, before and after
    "quickstart": (55.0, 90.0),
    "quickstart_tools": (40.0, 85.0),
}
PROBLEMS_TARGET = 200
QUICK = ("optim.max_steps=1", "optim.batch_size=4", "eval.samples=16", "eval.every=0")


@attrs.frozen
class Outcome:
    """The content of a run's log, and the system's data about its process if it was started here."""

    first: float  # exact match before training, %
    last: float  # at the end, %
    problems: int  # that the exact match was taken on
    updates: int
    mlx_peak: float  # bytes of MLX's arrays
    seconds: float = 0.0
    resident: float = 0.0  # bytes, the process's largest resident set
    printed: str = ""  # on its standard output


def outcome_of(folder: Path) -> Outcome:
    """The outcome in a run's folder.

    Raises:
        UserError: there is no log, or it lacks an evaluation before and one after training.
    """
    lines = read_log(folder)
    scores = [line for line in lines if "em" in line]
    updates = [line for line in lines if "reward" in line]
    if scores[-1]["update"] != updates[-1]["update"]:
        raise UserError(f"{folder} ends without an evaluation: the run was not finished")
    return Outcome(
        first=100 * scores[0]["em"],
        last=100 * scores[-1]["em"],
        problems=min(line["em_subset"] for line in (scores[0], scores[-1])),
        updates=updates[-1]["update"],
        mlx_peak=1e9 * max(line.get("memory/peak_gb", 0.0) for line in updates),
    )


def command_line() -> list[str]:
    """`grpo-run` of this environment; if the package is not installed, the same command by its
    module.
    """
    script = Path(sys.executable).parent / "grpo-run"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "runners.cli", "run"]


def run_quietly(command: Sequence[str], settings: Sequence[str]) -> None:
    """Runs a command in a separate process, without its output.

    Raises:
        UserError: it did not end well.
    """
    sets = [word for setting in settings for word in ("--set", setting)]
    code = subprocess.run([*command, *sets], stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise UserError(f"{' '.join(command)} ended with code {code}")


def run_seed(config: str, seed: int, folder: Path, overrides: Sequence[str]) -> Outcome:
    """One run of a preset in a separate process, with its output on stderr.

    Raises:
        UserError: it did not end well.
    """
    name = f"{config}-{seed}"
    settings = [f"run.seed={seed}", f"run.name={name}", f"run.output_dir={folder}", *overrides]
    sets = [word for setting in settings for word in ("--set", setting)]
    started = time.perf_counter()
    process = subprocess.Popen([*command_line(), config, *sets], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            say(line.rstrip())
        _, status, usage = os.wait4(process.pid, 0)
    except KeyboardInterrupt:
        process.wait()  # it got the interrupt as well, and ends cleanly
        raise
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise UserError(f"grpo-run {config} with seed {seed} ended with code {process.returncode}")
    resident = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return attrs.evolve(
        outcome_of(folder / name), seconds=seconds, resident=resident, printed="".join(printed)
    )


def figures_of(label: str, outcome: Outcome, *, judged: bool, config: str = "quickstart") -> list[Figure]:
    """The figures of one run, with their targets if `judged`; time and memory only if it was run
    here.
    """
    most, least = TARGETS[config]
    figures = [
        Figure(
            name=f"{label}: exact match before",
            value=outcome.first,
            unit="%",
            note=f"{outcome.problems} problems",
            at_most=most,
        ),
        Figure(
            name=f"{label}: exact match after",
            value=outcome.last,
            unit="%",
            note=f"{outcome.updates} updates; standard error {_standard_error(outcome):.1f}",
            at_least=least,
        ),
        Figure(name=f"{label}: held-out problems", value=outcome.problems, at_least=PROBLEMS_TARGET),
        Figure(name=f"{label}: peak of MLX's arrays", value=outcome.mlx_peak / 1e6, unit="MB"),
    ]
    if outcome.seconds:
        name = f"{label}: from command to end"
        figures.insert(0, Figure(name=name, value=outcome.seconds, unit="s", at_most=SECONDS_TARGET))
        figures.append(Figure(name=f"{label}: resident memory", value=outcome.resident / 1e6, unit="MB"))
    return figures if judged else [attrs.evolve(f, at_most=None, at_least=None) for f in figures]


def _standard_error(outcome: Outcome) -> float:
    share = outcome.last / 100
    return 100 * math.sqrt(share * (1 - share) / outcome.problems)


@benchmark("quickstart")
@click.option(
    "--seeds", default="0,1,2", show_default=True, callback=numbers, help="Seeds, with one run each."
)
@click.option(
    "--config", type=click.Choice(list(TARGETS)), default="quickstart", show_default=True, help="The preset."
)
@click.option("--set", "overrides", multiple=True, help="SECTION.KEY=VALUE, an override for every run.")
@click.option(
    "--of",
    "finished",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Run nothing; check the exact match of the finished run in this folder.",
)
def main(
    quick: bool, seeds: Sequence[int], config: str, overrides: Sequence[str], finished: Path | None
) -> Sequence[Figure] | Measured:
    """Measure a quickstart from command to end: seconds, exact match before and after, and memory,
    for each seed.
    """
    if finished:
        return figures_of(finished.name, outcome_of(finished), judged=not quick, config=config)
    if quick:
        seeds, overrides = seeds[:1], [*QUICK, *overrides]
    figures, printed = [], ""
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        for seed in seeds:
            say(f"{config}: seed {seed}")
            outcome = run_seed(config, seed, Path(folder), overrides)
            figures += figures_of(f"seed {seed}", outcome, judged=not quick, config=config)
            printed = printed or outcome.printed
    return Measured(figures, {TRANSCRIPT: printed})


if __name__ == "__main__":
    main()
