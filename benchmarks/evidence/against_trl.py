"""The quickstart here and in TRL's GRPOTrainer: does training come to the same, and what does it take?

Both sides get the shipped model, the same prompts as text, the same rewards and the quickstart's settings, on
the CPU in float32. Each draws its own batches and completions. TRL generates by transformers' own `generate`
and takes a whole batch at once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, run_command, run_folder
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
    """How far the sides' means are apart, and whether that is within the spread of the seeds."""

    def values(case: str, name: str) -> list[float]:
        found = [figure for figure in figures if figure.name.startswith(f"{case}: seed")]
        return [figure.value for figure in found if figure.name.endswith(f": {name}")]

    result = []
    for name, unit in ((AFTER, "%"), (REWARD, "")):
        ours, theirs = values(OURS, name), values(THEIRS, name)
        if len(ours) > 1 and len(theirs) > 1:
            both = max(*ours, *theirs) - min(*ours, *theirs)
            apart = abs(statistics.fmean(ours) - statistics.fmean(theirs))
            note = f"means of {len(ours)} and {len(theirs)} seeds; the target is the range of all"
            title = f"{ALL_SEEDS}: {name}: means apart"
            result.append(Figure(name=title, value=apart, unit=unit, note=note, at_most=both))
    ours, theirs = values(OURS, SECONDS), values(THEIRS, SECONDS)
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
    """The quickstart here and in TRL's GRPOTrainer: reward, exact match, time and memory over seeds."""
    overrides = QUICK if plan.quick else ()
    given = plan.work / "trl.json"
    given.write_text(json.dumps(side_settings(load_config("quickstart", overrides))), encoding="utf-8")
    trials = []
    for seed in plan.seeds:
        for case in plan.cases:
            if case == LOGITS and seed == plan.seeds[0]:
                trials.append(_logits(plan.work, given))
            elif case == OURS:
                trials.append(_ours(plan.work, seed, overrides))
            elif case == THEIRS:
                trials.append(_theirs(plan.work, given, seed))
    # What takes longest first, so that none is left alone at the end.
    return sorted(trials, key=lambda trial: [THEIRS, OURS, LOGITS].index(trial.case))


def _ours(work: Path, seed: int, overrides: Sequence[str]) -> Trial:
    name = f"ours-{seed}"
    command = run_command("quickstart", work, name, (f"run.seed={seed}", *overrides))
    read = run_folder(work, name)
    return Trial(case=OURS, seed=seed, command=command, read=lambda: learning(read_log(read)))


def side(*words: str) -> list[str]:
    """The command of TRL's process."""
    return [sys.executable, "-m", "benchmarks.sides", *words]


def _theirs(work: Path, given: Path, seed: int) -> Trial:
    folder = work / "runs" / f"trl-{seed}"
    return Trial(
        case=THEIRS,
        seed=seed,
        command=side("train", str(given), str(folder), str(seed)),
        read=lambda: learning(read_log(folder)),
        environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
    )


def _logits(work: Path, given: Path) -> Trial:
    out = work / "logits.json"

    def read() -> list[Figure]:
        found = json.loads(out.read_text(encoding="utf-8"))
        note = f"{found['tokens']:,} tokens of prompts, logits from {found['low']:.1f} to {found['high']:.1f}"
        return [Figure(name=LARGEST_DIFFERENCE, value=found["difference"], note=note, at_most=SAME_LOGITS)]

    return Trial(case=LOGITS, seed=0, command=side("logits", str(given), str(out)), read=read)


if __name__ == "__main__":
    main()
