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
from typing import Any

import attrs
import click

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, real_settings, run_trial, values
from benchmarks.evidence.readings import HELD_OUT_AFTER, LENGTH, sampler
from benchmarks.evidence.real_model import CONFIG, QUICK, TASKS, TRAINED, over_time
from benchmarks.harness.record import Figure
from benchmarks.quickstart import command_line

SHIPPED = "quickstart"
STALENESSES = (0, 1, 2, 4)
CORRECTIONS = {
    "none": ("loss.correction=none",),
    "token_truncate": ("loss.correction=token_truncate",),
    "ipo": (
        "loss.correction=none",
        "loss.surrogate=ipo",
        "loss.epsilon_low=0.3",
        "loss.epsilon_high=0.3",
    ),
}
CASES = tuple(
    f"{task}, staleness {staleness}, {correction}"
    for task, staleness, correction in itertools.product(
        (SHIPPED, "JSON form", "GSM8K"), STALENESSES, CORRECTIONS
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
        result.append(
            Figure(
                name=f"{ALL_SEEDS}: {case}: below staleness 0",
                value=100 * (statistics.fmean(before) - statistics.fmean(after)),
                unit="points",
                at_most=100 * (max(before) - min(before)) if judged else None,
            )
        )
        taken, usual = (statistics.fmean(values(figures, each, TRAINED)) for each in (case, fresh))
        title = f"{ALL_SEEDS}: {case}: {TRAINED} / staleness 0"
        result.append(Figure(name=title, value=taken / usual, unit="x"))
    return result


@evidence(
    "staleness",
    cases=CASES,
    quick_cases=[f"{SHIPPED}, staleness 1, none"],
    seeds="0,1,2",
    summary=summary,
)
@click.option("--gsm8k", default="openai/gsm8k", show_default=True, help="Data of the task `GSM8K`.")
@click.option("--updates", default=0, help="Of each run [the task's own].")
def main(plan: Plan, gsm8k: str, updates: int) -> Sequence[Trial]:
    """Learning from completions of older weights, with and without a correction."""
    pretrained = any(not case.startswith(SHIPPED) for case in plan.cases)
    real = real_settings(plan) if pretrained else []
    trials = []
    for case, seed in itertools.product(plan.cases, plan.seeds):
        task, staleness, correction = case.split(", ")
        if task != SHIPPED and not real:
            continue
        settings = [f"rollout.max_staleness={staleness.split()[1]}", *CORRECTIONS[correction]]
        if task != SHIPPED:
            source = gsm8k if task == "GSM8K" else "embedded"
            settings = [*real, f"data.source={source}", *TASKS[task], *settings]
        if updates:
            settings.append(f"optim.max_steps={updates}")
        settings += QUICK if plan.quick else ()
        config = SHIPPED if task == SHIPPED else CONFIG
        trial = run_trial(plan, case, seed, config, settings, read)
        if correction == "none":
            words = trial.command[len(command_line()) :]
            own = [sys.executable, "-m", "benchmarks.evidence.staleness", _UNCORRECTED]
            trial = attrs.evolve(trial, command=[*own, *words])
        trials.append(trial)
    return trials


def read(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """The figures of a run's log."""
    lengths = [line["completions/mean_length"] for line in lines if "completions/mean_length" in line]
    last = lengths[-max(len(lengths) // 10, 1) :]
    return [*over_time(lines), *sampler(lines), Figure(name=LENGTH, value=statistics.fmean(last))]


def uncorrected() -> None:
    """`grpo-run` without its demand for a correction, to study what happens then."""
    from runners.cli import run_command
    from runners.config import checks

    check = checks.check_complete
    checks.check_complete = lambda config: check(config.having("loss", correction="token_truncate"))
    sys.argv = ["grpo-run", *sys.argv[2:]]
    run_command()


if __name__ == "__main__":
    (uncorrected if sys.argv[1:2] == [_UNCORRECTED] else main)()
