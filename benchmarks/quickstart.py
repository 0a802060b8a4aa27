"""How long does a quickstart take from command to end, and how much does it learn?

Each seed is a separate process, timed from the command to its end, including imports, tracing,
evaluations and the final model. Exact match is greedy, on held-out problems, and is read from the
run's log.

**What limits it.** Its 100 steps: `grpo bench quickstart` measures their parts.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import click

from benchmarks.harness.command import benchmark, numbers, say
from benchmarks.harness.headlines import TRANSCRIPT
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import Job, Usage, finish, placed, read_log, run_command
from runners.errors import UserError

SECONDS_TARGET = 120.0
TARGETS = {  # of each preset: per cent exact match on held-out problems, before and after
    "quickstart": (55.0, 90.0),
    "quickstart_tools": (40.0, 85.0),
}
PROBLEMS_TARGET = 200
QUICK = ("optim.max_steps=1", "optim.batch_size=4", "eval.samples=16", "eval.every=0")


def run_seed(config: str, seed: int, folder: Path, overrides: Sequence[str]) -> Usage:
    """One run of a preset in a separate process, with its output on stderr and in FOLDER.txt."""
    settings = [*placed(folder, seed), "log.report=true", *overrides]
    return finish(
        Job(
            name=f"grpo-run {config} with seed {seed}",
            command=run_command(config, settings),
            printed=folder.with_suffix(".txt"),
            heard=lambda seconds, line: say(line),
        )
    )


def figures_of(
    label: str, folder: Path, usage: Usage | None, *, judged: bool, config: str = "quickstart"
) -> list[Figure]:
    """The figures of a finished run, with their targets if `judged`; time and memory only with the
    usage of its process.

    Raises:
        UserError: the log lacks an evaluation before or after training.
    """
    most, least = TARGETS[config]
    lines = read_log(folder)
    scores = [line for line in lines if "em" in line]
    updates = [line for line in lines if "reward" in line]
    if scores[-1]["update"] != updates[-1]["update"]:
        raise UserError(f"{folder} ends without an evaluation: the run was not finished")
    problems = min(line["em_subset"] for line in (scores[0], scores[-1]))
    share = scores[-1]["em"]
    error = 100 * math.sqrt(share * (1 - share) / problems)
    after = f"{updates[-1]['update']} updates; standard error {error:.1f}"
    peak = 1e3 * max(line.get("memory/peak_gb", 0.0) for line in updates)
    figures = [
        Figure("exact match before", 100 * scores[0]["em"], "%", note=f"{problems} problems", at_most=most),
        Figure("exact match after", 100 * share, "%", note=after, at_least=least),
        Figure("held-out problems", problems, at_least=PROBLEMS_TARGET),
        Figure("peak of MLX's arrays", peak, "MB"),
    ]
    if usage:
        seconds = Figure("from command to end", usage.seconds, "s", at_most=SECONDS_TARGET)
        figures.insert(0, seconds)
        figures.append(Figure("resident memory", usage.resident / 1e6, "MB"))
    named = [attrs.evolve(figure, name=f"{label}: {figure.name}") for figure in figures]
    return named if judged else [figure.unjudged() for figure in named]


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
) -> Iterator[Sequence[Figure]]:
    """Measure a quickstart from command to end: seconds, exact match before and after, and memory,
    for each seed.
    """
    if finished:
        yield figures_of(finished.name, finished, None, judged=not quick, config=config)
        return
    if quick:
        seeds, overrides = seeds[:1], [*QUICK, *overrides]
    with tempfile.TemporaryDirectory(prefix="quickstart-") as work:
        for seed in seeds:
            say(f"{config}: seed {seed}")
            folder = Path(work) / f"{config}-{seed}"
            usage = run_seed(config, seed, folder, overrides)
            yield figures_of(f"seed {seed}", folder, usage, judged=not quick, config=config)
            if seed == seeds[0]:
                printed = folder.with_suffix(".txt").read_text(encoding="utf-8")
                (click.get_current_context().obj / TRANSCRIPT).write_text(printed, encoding="utf-8")


if __name__ == "__main__":
    main()
