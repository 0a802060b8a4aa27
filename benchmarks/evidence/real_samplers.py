"""Few-bit samplers of a real pretrained model: learning curves, the mismatch, and the time of a
sync.

The pretrained model in GRPO_REAL_MODEL learns to answer in one line of JSON, and to add numbers, from
completions in full precision, 8 bits, 4 bits rounded to nearest and 4 bits calibrated; each with
`token_truncate` and without a correction. The format never changes during a run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, real_settings, run_trial, values
from benchmarks.evidence.readings import HELD_OUT_AFTER, SYNC, sampler
from benchmarks.evidence.real_model import CONFIG, TASKS, over_time, sums_data
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure

FULL, CALIBRATED = "full precision", "affine-4 calibrated"
SAMPLERS = {
    FULL: ("rollout.quantization=none",),
    "affine-8": ("rollout.quantization=affine-8",),
    "affine-4 to nearest": ("rollout.quantization=affine-4", "rollout.calibration=none"),
    CALIBRATED: ("rollout.quantization=affine-4",),
}
CORRECTIONS = ("token_truncate", "none")
CASES = tuple(", ".join(case) for case in itertools.product(("JSON form", "sums"), SAMPLERS, CORRECTIONS))
SETTINGS = ("rollout.mismatch_limit=0",)
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=4", "rollout.max_new_tokens=16")
NEAR, SYNC_SHARE = 2.0, 10.0  # points of held-out reward below full precision; % of a step's time


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """The gap between each few-bit sampler and full precision: the difference of the means, with
    100 points per unit of reward.
    """

    result = []
    for task, form, correction in (case.split(", ") for case in CASES):
        full = values(figures, f"{task}, {FULL}, {correction}", HELD_OUT_AFTER)
        found = values(figures, f"{task}, {form}, {correction}", HELD_OUT_AFTER)
        if form != FULL and full and found:
            title = f"{ALL_SEEDS}: {task}, {form}, {correction}: below full precision"
            target = NEAR if form == CALIBRATED and correction != "none" else None
            below = max(100 * (statistics.fmean(full) - statistics.fmean(found)), 0.0)
            result.append(Figure(name=title, value=below, unit="points", at_most=target))
    usual = f", {CALIBRATED}, {CORRECTIONS[0]}: "
    syncs = [f.value for f in figures if usual in f.name and f.name.endswith(f": {SYNC}")]
    if syncs:
        title = f"{ALL_SEEDS}: {CALIBRATED}, {CORRECTIONS[0]}: {SYNC}, at most"
        target = None if backend() == "cpu" else SYNC_SHARE
        result.append(Figure(name=title, value=max(syncs), unit="%", at_most=target))
    return result


@evidence(
    "real_samplers",
    cases=CASES,
    quick_cases=[", ".join(("JSON form", CALIBRATED, "token_truncate"))],
    seeds="0,1,2",
    summary=summary,
)
@click.option("--sums", default="reasoning-gym:chain_sum", show_default=True, help="Data of the task `sums`.")
def main(plan: Plan, sums: str) -> Sequence[Trial]:
    """Train a pretrained model (GRPO_REAL_MODEL) that samples with few bits: rewards, mismatch,
    time of a sync.
    """
    real = real_settings(plan)
    trials = []
    for case, seed in itertools.product(plan.cases if real else (), plan.seeds):
        task, form, correction = case.split(", ")
        settings = [
            *real,
            *(sums_data(sums) if task == "sums" else ("data.source=embedded",)),
            *TASKS[task],
            *SETTINGS,
            *SAMPLERS[form],
            f"loss.correction={correction}",
            *(("rollout.group_size=32",) if "model.path=embedded" in real and form != FULL else ()),
            *(QUICK if plan.quick else ()),
        ]
        trials.append(run_trial(plan, case, seed, CONFIG, settings, read))
    return trials


def read(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """The figures of a run's log."""
    return [*over_time(lines), *sampler(lines), sync_share(lines)]


def sync_share(lines: Sequence[dict[str, Any]]) -> Figure:
    """The time of a sync as a percentage of a step's time, median over the updates."""
    shares = [100 * line["time/sync"] / line["step_time"] for line in lines if "time/sync" in line]
    return Figure(name=SYNC, value=statistics.median(shares), unit="%")


if __name__ == "__main__":
    main()
