"""Compares the quickstart here and in TRL's GRPOTrainer: does training have the same result, and at
what cost?

Both sides use the shipped model, the same prompts as text, the same rewards and the quickstart's
settings, on the CPU in float32. Each samples its own batches and completions. TRL generates with
transformers' own `generate` and processes a whole batch at once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.command import (
    ALL_SEEDS,
    Plan,
    Reading,
    Trial,
    evidence,
    run_folder,
    run_trial,
    values,
)
from benchmarks.evidence.readings import AFTER, REWARD, SECONDS, learning, read_log
from benchmarks.harness.record import Figure
from benchmarks.sides import side_settings
from runners.config.loading import load_config

OURS, THEIRS, LOGITS = "grpo_fn", "TRL", "logits"
CASES = (LOGITS, OURS, THEIRS)
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=8", "eval.every=1")
LARGEST_DIFFERENCE = "largest difference"
SAME_LOGITS = 1e-4


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """The difference of the sides' means, and whether it is within the spread of the seeds."""

    result = []
    for name, unit in ((AFTER, "%"), (REWARD, "")):
        ours, theirs = values(figures, OURS, name), values(figures, THEIRS, name)
        if len(ours) > 1 and len(theirs) > 1:
            both = max(*ours, *theirs) - min(*ours, *theirs)
            apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
            note = f"means of {len(ours)} and {len(theirs)} seeds; the target is the range of all"
            title = f"{ALL_SEEDS}: {name}: means apart"
            result.append(Figure(name=title, value=apart, unit=unit, note=note, at_most=both))
    ours, theirs = values(figures, OURS, SECONDS), values(figures, THEIRS, SECONDS)
    if ours and theirs:
        ratio = statistics.fmean(theirs) / statistics.fmean(ours)
        result.append(Figure(name=f"{ALL_SEEDS}: {SECONDS}: {THEIRS} / {OURS}", value=ratio, unit="x"))
    return result


@evidence(
    "against_trl",
    cases=CASES,
    quick_cases=CASES,
    seeds="0,1,2,3,4",
    summary=summary,
    packages=("trl", "transformers", "torch"),
)
def main(plan: Plan) -> Sequence[Trial]:
    """Compare the quickstart here and in TRL's GRPOTrainer: reward, exact match, time and memory
    over seeds.
    """
    overrides = QUICK if plan.quick else ()
    given = plan.work / "trl.json"
    given.write_text(json.dumps(side_settings(load_config("quickstart", overrides))), encoding="utf-8")
    trials = []
    for seed in plan.seeds:
        for case in plan.cases:
            if case == LOGITS and seed == plan.seeds[0]:
                trials.append(_logits(plan.work, given))
            elif case == OURS:
                trials.append(run_trial(plan, case, seed, "quickstart", overrides, learning))
            elif case == THEIRS:
                trials.append(their_trial(plan, case, seed, given, learning))
    # What takes longest first, so that none is left alone at the end.
    return sorted(trials, key=lambda trial: [THEIRS, OURS, LOGITS].index(trial.case))


def their_trial(plan: Plan, case: str, seed: int, given: Path, read: Reading) -> Trial:
    """TRL's training, with the settings in a file, as a trial."""
    folder = run_folder(plan, case, seed)
    return Trial(
        case=case,
        seed=seed,
        command=_side("train", str(given), str(folder), str(seed)),
        read=lambda: read(read_log(folder)),
        environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
    )


def _side(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.sides", *words]


def _logits(work: Path, given: Path) -> Trial:
    out = work / "logits.json"

    def read() -> list[Figure]:
        found = json.loads(out.read_text(encoding="utf-8"))
        note = f"{found['tokens']:,} tokens of prompts, logits from {found['low']:.1f} to {found['high']:.1f}"
        return [Figure(name=LARGEST_DIFFERENCE, value=found["difference"], note=note, at_most=SAME_LOGITS)]

    return Trial(case=LOGITS, seed=0, command=_side("logits", str(given), str(out)), read=read)


if __name__ == "__main__":
    main()
