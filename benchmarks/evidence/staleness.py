"""Rollouts ahead: does a model learn as well from completions of older weights?

Each case trains with `rollout.max_staleness` of 0, 1, 2 or 4, and with `token_truncate`, with the trust
region `ipo`, or with neither ("none", which `grpo-run` refuses above a staleness of 0). `quickstart` is the
shipped model; the other tasks need the pretrained model in GRPO_REAL_MODEL.

A call that ends early is continued with `--missing`: `--minutes 9 --missing` again and again does all runs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence

import click

from benchmarks.evidence.command import ALL_SEEDS, Trial, evidence, values
from benchmarks.evidence.readings import HELD_OUT_AFTER, LENGTH, TRAINED, last_tenth, over_time, sampler
from benchmarks.evidence.real_model import GSM8K, SHIPPED, task_config, task_settings
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import Lines, placed, run_command

CORRECTIONS = {
    "none": ("loss.correction=none",),
    "token_truncate": ("loss.correction=token_truncate",),
    "ipo": ("loss.correction=none", "loss.surrogate=ipo", "loss.epsilon_low=0.3", "loss.epsilon_high=0.3"),
}
CASES = tuple(
    f"{task}, staleness {staleness}, {correction}"
    for task, staleness, correction in itertools.product(
        (SHIPPED, "JSON form", "GSM8K"), (0, 1, 2, 4), CORRECTIONS
    )
)
_UNCORRECTED = "--uncorrected"


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """How far each case ends below staleness 0, in points, and the share of its time that it takes.

    With a correction, a staleness of 1 may end below the mean of staleness 0 by the range of its seeds.
    """
    result = []
    for case in CASES:
        task, staleness, correction = case.split(", ")
        fresh = f"{task}, staleness 0, {correction}"
        before, after = (values(figures, each, HELD_OUT_AFTER) for each in (fresh, case))
        if case == fresh or not (before and after):
            continue
        judged = staleness == "staleness 1" and correction != "none"
        most = 100 * (max(before) - min(before)) if judged else None
        below = 100 * (statistics.fmean(before) - statistics.fmean(after))
        title = f"{ALL_SEEDS}: {case}"
        result.append(Figure(f"{title}: below staleness 0", below, "points", at_most=most))
        taken, usual = (statistics.fmean(values(figures, each, TRAINED)) for each in (case, fresh))
        result.append(Figure(f"{title}: {TRAINED} / staleness 0", taken / usual, "x"))
    return result


def read(lines: Lines) -> list[Figure]:
    """The figures of a run's log."""
    lengths = [line["completions/mean_length"] for line in lines if "completions/mean_length" in line]
    return [*over_time(lines), *sampler(lines), Figure(LENGTH, last_tenth(lengths))]


@evidence(
    "staleness",
    cases=CASES,
    quick_cases=[f"{SHIPPED}, staleness 1, none"],
    seeds="0,1,2",
    read=read,
    summary=summary,
)
@GSM8K
@click.option("--updates", default=0, help="Of each run [the task's own].")
def main(trial: Trial, gsm8k: str, updates: int) -> Sequence[str]:
    """Compare learning from completions of older weights, with and without a correction."""
    task, staleness, correction = trial.case.split(", ")
    settings = task_settings(task, trial.quick, gsm8k=gsm8k)
    if settings is None:
        return []
    settings += [f"rollout.max_staleness={staleness.split()[1]}", *CORRECTIONS[correction]]
    settings += [f"optim.max_steps={updates}"] if updates else []
    command = run_command(task_config(task), [*settings, *placed(trial.folder, trial.seed)])
    if correction != "none":
        return command
    words = command[len(run_command("", [])) - 1 :]
    return [sys.executable, "-m", "benchmarks.evidence.staleness", _UNCORRECTED, *words]


def uncorrected() -> None:
    """`grpo-run` without its demand for a correction, to study what happens then."""
    from runners import cli
    from runners.config import checks

    check = checks.check_complete
    checks.check_complete = lambda config: check(config.having("loss", correction="token_truncate"))
    sys.argv = ["grpo-run", *sys.argv[2:]]
    cli.run_command()


if __name__ == "__main__":
    (uncorrected if sys.argv[1:2] == [_UNCORRECTED] else main)()
