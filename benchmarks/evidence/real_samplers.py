"""Few-bit samplers of a real pretrained model: learning curves, the mismatch, and what a sync takes.

The pretrained model in GRPO_REAL_MODEL learns to answer in one line of JSON, and to add numbers, from
completions in full precision, 8 bits, 4 bits rounded to nearest and 4 bits calibrated; each with
`token_truncate` and without a correction. A format is kept whatever comes of it.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, run_command, run_folder
from benchmarks.evidence.readings import HELD_OUT_AFTER, SYNC, read_log, sampler
from benchmarks.evidence.real_model import CONFIG, MODEL, over_time, sums_data
from benchmarks.evidence.real_tasks import TASKS
from benchmarks.harness.machine import backend
from benchmarks.harness.record import Figure
from runners.errors import UserError

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
    """How far each few-bit sampler stays below full precision: the means' difference, 100 points a reward."""

    def mean(task: str, form: str, correction: str) -> float | None:
        start = f"{task}, {form}, {correction}: seed"
        found = [
            f.value for f in figures if f.name.startswith(start) and f.name.endswith(f": {HELD_OUT_AFTER}")
        ]
        return statistics.fmean(found) if found else None

    result = []
    for task, form, correction in (case.split(", ") for case in CASES):
        full, found = mean(task, FULL, correction), mean(task, form, correction)
        if form != FULL and full is not None and found is not None:
            title = f"{ALL_SEEDS}: {task}, {form}, {correction}: below full precision"
            target = NEAR if form == CALIBRATED and correction != "none" else None
            below = max(100 * (full - found), 0.0)
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
    """A pretrained model (GRPO_REAL_MODEL) that samples in few bits: rewards, mismatch, time of a sync."""
    folder = os.environ.get(MODEL, "embedded" if plan.quick else "")
    if not folder:
        raise UserError(f"{MODEL} is not set: expected the folder of a pretrained model")
    trials = []
    for case, seed in itertools.product(plan.cases, plan.seeds):
        task, form, correction = case.split(", ")
        name = f"{case}-{seed}".replace(" ", "-").replace(",", "")
        settings = [
            f"run.seed={seed}",
            f"model.path={folder}",
            f"model.dtype={'float32' if backend() == 'cpu' else 'bfloat16'}",
            *(sums_data(sums) if task == "sums" else ("data.source=embedded",)),
            *TASKS[task],
            *SETTINGS,
            *SAMPLERS[form],
            f"loss.correction={correction}",
            *(("rollout.group_size=32",) if folder == "embedded" and form != FULL else ()),
            *(QUICK if plan.quick else ()),
        ]
        log = run_folder(plan.work, name)
        command = run_command(CONFIG, plan.work, name, settings)
        trials.append(Trial(case=case, seed=seed, command=command, read=_reading(log)))
    return trials


def _reading(folder: Path) -> Callable[[], list[Figure]]:
    def read() -> list[Figure]:
        lines = read_log(folder)
        return [*over_time(lines), *sampler(lines), sync_share(lines)]

    return read


def sync_share(lines: Sequence[dict[str, Any]]) -> Figure:
    """The time of a sync in per cent of a step's, the median over the updates."""
    shares = [100 * line["time/sync"] / line["step_time"] for line in lines if "time/sync" in line]
    return Figure(name=SYNC, value=statistics.median(shares), unit="%")


if __name__ == "__main__":
    main()
