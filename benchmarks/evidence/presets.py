"""The nine presets of the loss side by side, on packaged problems that the shipped model mostly gets wrong.

Four updates from each rollout, so that the ratios leave 1 and each algorithm's clipping comes into play. With
one update a rollout most of the nine have nearly the same gradient.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.evidence.command import Plan, Trial, evidence, run_trial
from benchmarks.evidence.readings import learning
from benchmarks.quickstart_model.problems import SPLIT_ROWS, draw
from grpo_fn import PRESETS

CONFIG = """
[run]
overwrite = true
[model]
path = "embedded"
[data]
source = "{data}"
system_prompt = ""
nudge = "<reasoning>"
[rollout]
num_generations = 8
max_new_tokens = 48
[optim]
learning_rate = 3e-4
schedule = "linear"
warmup_ratio = 0.03
betas = [0.9, 0.95]
batch_size = 16
max_steps = 30
num_iterations = 2
minibatches = 2
[eval]
every = 20
samples = 200
[checkpoint]
every = 0
"""
QUICK = ("optim.max_steps=1", "optim.batch_size=2", "eval.samples=8", "eval.every=0")


def hard_rows(split: str) -> list[dict[str, str]]:
    """The shipped rows of a split whose kind of problem the shipped model has learnt to misread."""
    count, seed = SPLIT_ROWS[split]
    rng = np.random.default_rng(seed)
    rows: dict[str, tuple[dict[str, str], bool]] = {}
    while len(rows) < count:  # as the shipped files were drawn
        problem = draw(rng, split)
        rows.setdefault(problem.question, (problem.row, problem.habit is not None))
    return [row for row, hard in rows.values() if hard]


def write_hard(folder: Path) -> None:
    """The split as a folder that a config can name."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in hard_rows(split))
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


@evidence("presets", cases=tuple(PRESETS), quick_cases=("grpo", "gspo"), seeds="0,1,2")
def main(plan: Plan) -> Sequence[Trial]:
    """The nine presets of the loss side by side on one hard split, with four updates from each rollout."""
    write_hard(plan.work / "hard")
    config = plan.work / "presets.toml"
    config.write_text(CONFIG.format(data=plan.work / "hard"), encoding="utf-8")
    more = QUICK if plan.quick else ()
    return [
        run_trial(plan, case, seed, config, (f"loss.preset={case}", *more), learning)
        for seed in plan.seeds
        for case in plan.cases
    ]


if __name__ == "__main__":
    main()
