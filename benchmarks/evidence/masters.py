"""Weights kept in bfloat16 against weights kept in float32, at learning rates at which rounding matters.

bfloat16 is rounded stochastically, as in every run, and, for comparison only, to the nearest number.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from benchmarks.evidence.command import Plan, Trial, evidence, run_folder, run_trial
from benchmarks.evidence.readings import learning
from benchmarks.harness.record import Figure
from runners.quickstart import MODEL_DIR

RATES = ("1e-6", "3e-6", "1e-5")
MASTERS = ("float32", "bfloat16, stochastic", "bfloat16, nearest")
CASES = tuple(f"{rate}, {master}" for rate, master in itertools.product(RATES, MASTERS))
SETTINGS = (
    "optim.max_steps=120",
    "optim.batch_size=8",
    "optim.schedule=constant",
    "eval.every=40",
    "model.dtype=float32",
)
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=8", "eval.every=0")
MOVED = "weights moved"


def moved(before: dict[str, mx.array], after: dict[str, mx.array]) -> Figure:
    """How far the weights are from the shipped ones: the difference's norm over theirs."""
    difference, size = 0.0, 0.0
    for name, old in before.items():
        old, new = old.astype(mx.float32), after[name].astype(mx.float32)
        difference += float(mx.square(new - old).sum())
        size += float(mx.square(old).sum())
    return Figure(name=MOVED, value=1e3 * (difference / size) ** 0.5, unit="‰")


@evidence("masters", cases=CASES, quick_cases=(CASES[0], CASES[1], CASES[2]), seeds="0,1,2")
def main(plan: Plan) -> Sequence[Trial]:
    """Weights in bfloat16, stochastically rounded, against float32 at learning rates of 1e-6 to 1e-5."""
    return [_trial(plan, case, seed) for seed in plan.seeds for case in plan.cases]


def _trial(plan: Plan, case: str, seed: int) -> Trial:
    rate, master, *rounding = case.split(", ")
    settings = (
        *SETTINGS,
        *(QUICK if plan.quick else ()),
        f"optim.learning_rate={rate}",
        f"model.master={master}",
    )
    folder = run_folder(plan, case, seed)

    def read(lines: Sequence[dict[str, Any]]) -> list[Figure]:
        before, after = (_weights(path) for path in (MODEL_DIR, folder / "final"))
        return [*learning(lines), moved(before, after)]

    trial = run_trial(plan, case, seed, "quickstart", settings, read)
    if rounding != ["nearest"]:
        return trial
    options = trial.command[trial.command.index("quickstart") :]
    return attrs.evolve(trial, command=[sys.executable, "-m", "benchmarks.evidence.nearest", *options])


def _weights(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


if __name__ == "__main__":
    main()
