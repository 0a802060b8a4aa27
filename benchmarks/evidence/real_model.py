"""Trains a model here and in TRL's GRPOTrainer, and compares rewards over seconds of training.

The model is the folder in GRPO_REAL_MODEL, and for the task `quickstart` the shipped one. Both sides
use the same prompts (as the same tokens), rewards and settings: all weights, stored in float32, with
products in bfloat16 on a GPU. Each samples its own batches and completions. TRL generates with
transformers' own `generate`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.evidence.command import ALL_SEEDS, Trial, evidence, real_settings, values
from benchmarks.evidence.readings import SECONDS, STEP, TRAINED, over_time
from benchmarks.harness.record import Figure
from benchmarks.harness.runs import placed, run_command
from benchmarks.sides import side_settings, their_command
from runners.config.loading import load_config

CONFIG = Path(__file__).with_suffix(".toml")
OURS, THEIRS, SHIPPED = "grpo_fn", "TRL", "quickstart"
_RIGHT = ('reward.functions=["correctness_reward_func"]', "answer.form=last_number")
TASKS: dict[str, tuple[str, ...]] = {
    "JSON form": (
        'data.system_prompt=You reply with one line of JSON only, such as {"answer": 12}',
        'data.nudge={"',
        f'reward.functions=["{Path(__file__).with_name("tasks.py")}:one_line_json"]',
        "answer.form=none",
        "rollout.max_new_tokens=128",
        "optim.max_steps=24",
    ),
    "sums": (
        *_RIGHT,
        'data.system_prompt=""',
        "data.nudge=The answer is",
        "rollout.max_new_tokens=8",
        "optim.max_steps=60",
    ),
    "GSM8K": (*_RIGHT, "data.eval_split=test", "rollout.max_new_tokens=200", "optim.max_steps=40"),
}
"""Name -> overrides of real_model.toml; the data of `sums` and `GSM8K` are options of the command."""
PROBLEMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Settings of reasoning-gym's chain_sum, for which about 13 % of a small model's completions are
right.
"""
CASES = tuple(f"{task}, {who}" for task in (*TASKS, SHIPPED) for who in (OURS, THEIRS))
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=4", "rollout.max_new_tokens=16")
SUMS = click.option(
    "--sums", default="reasoning-gym:chain_sum", show_default=True, help="Data of the task `sums`."
)
GSM8K = click.option("--gsm8k", default="openai/gsm8k", show_default=True, help="Data of the task `GSM8K`.")


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """The ratio of TRL's time to ours for each task."""
    result = []
    for case in CASES[::2]:
        task = case.removesuffix(f", {OURS}")
        for name in (TRAINED, STEP, SECONDS):
            ours, theirs = (values(figures, f"{task}, {who}", name) for who in (OURS, THEIRS))
            if ours and theirs:
                ratio = statistics.fmean(theirs) / statistics.fmean(ours)
                title = f"{ALL_SEEDS}: {task}: {name}: {THEIRS} / {OURS}"
                result.append(Figure(title, ratio, "x"))
    return result


def task_settings(task: str, quick: bool, sums: str = "", gsm8k: str = "") -> list[str] | None:
    """Overrides of the task's config; None if it needs a pretrained model, and there is none."""
    small = QUICK if quick else ()
    if task == SHIPPED:
        return [*small]
    real = real_settings(quick)
    data = {"sums": sums, "GSM8K": gsm8k}.get(task, "embedded")
    named = (f"data.name={json.dumps(json.dumps(PROBLEMS))}",) if data.startswith("reasoning-gym:") else ()
    return [*real, f"data.source={data}", *named, *TASKS[task], *small] if real else None


def task_config(task: str) -> str:
    """The config of the task: a preset's name, or a file."""
    return SHIPPED if task == SHIPPED else str(CONFIG)


@evidence(
    "real_model",
    cases=CASES,
    quick_cases=CASES[:1],
    seeds="0,1,2",
    read=over_time,
    summary=summary,
    packages=("trl", "transformers", "torch"),
)
@SUMS
@GSM8K
def main(trial: Trial, sums: str, gsm8k: str) -> Sequence[str]:
    """Compare the training of a model (GRPO_REAL_MODEL) here and in TRL's GRPOTrainer: rewards over
    seconds.
    """
    task, who = trial.case.rsplit(", ", 1)
    settings = task_settings(task, trial.quick, sums, gsm8k)
    if settings is None:
        return []
    if who == OURS:
        return run_command(task_config(task), [*settings, *placed(trial.folder, trial.seed)])
    theirs = side_settings(load_config(task_config(task), settings))
    return their_command("train", theirs, trial.folder, trial.seed)


if __name__ == "__main__":
    main()
