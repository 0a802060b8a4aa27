"""Trains a real pretrained model here and in TRL's GRPOTrainer, and compares rewards over seconds
of training.

The model is the folder in GRPO_REAL_MODEL. Both sides use the same prompts (as the same tokens),
rewards and settings: all weights, stored in float32, with products in bfloat16 on a GPU. Each
samples its own batches and completions. TRL generates with transformers' own `generate`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.evidence.against_trl import OURS, THEIRS, their_trial
from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, real_settings, run_trial, values
from benchmarks.evidence.readings import HELD_OUT_AFTER, HELD_OUT_BEFORE, PEAK, REWARD, STEP
from benchmarks.harness.record import Curve, Figure
from benchmarks.sides import side_settings
from runners.config.loading import load_config

CONFIG = Path(__file__).with_suffix(".toml")
_RIGHT = ('reward.functions=["correctness_reward_func"]', "answer.form=last_number")
TASKS: dict[str, tuple[str, ...]] = {
    "JSON form": (
        'data.system_prompt=You reply with one line of JSON only, such as {"answer": 12}',
        'data.nudge={"',
        f'reward.functions=["{Path(__file__).with_name("json_reward.py")}:one_line_json"]',
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
CASES = tuple(f"{task}, {who}" for task in TASKS for who in (OURS, THEIRS))
QUICK = ("optim.max_steps=2", "optim.batch_size=2", "eval.samples=4", "rollout.max_new_tokens=16")
GRID = 2.0  # seconds between two points of a curve over time
TRAINED = "seconds of training"


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """The ratio of TRL's time to ours for each task."""
    result = []
    for task in TASKS:
        for name in (TRAINED, STEP):
            ours, theirs = (values(figures, f"{task}, {who}", name) for who in (OURS, THEIRS))
            if ours and theirs:
                ratio = statistics.fmean(theirs) / statistics.fmean(ours)
                title = f"{ALL_SEEDS}: {task}: {name}: {THEIRS} / {OURS}"
                result.append(Figure(name=title, value=ratio, unit="x"))
    return result


@evidence(
    "real_model",
    cases=CASES,
    quick_cases=CASES[:1],
    seeds="0,1,2",
    summary=summary,
    packages=("trl", "transformers", "torch"),
)
@click.option("--sums", default="reasoning-gym:chain_sum", show_default=True, help="Data of the task `sums`.")
@click.option("--gsm8k", default="openai/gsm8k", show_default=True, help="Data of the task `GSM8K`.")
def main(plan: Plan, sums: str, gsm8k: str) -> Sequence[Trial]:
    """Compare a pretrained model (GRPO_REAL_MODEL) here and in TRL's GRPOTrainer: rewards over
    seconds.
    """
    real = real_settings(plan)
    trials = []
    for case in plan.cases if real else ():
        task, who = case.rsplit(", ", 1)
        data = {"sums": sums, "GSM8K": gsm8k}.get(task, "embedded")
        settings = [
            *real,
            *sums_data(data),
            *TASKS[task],
            *(QUICK if plan.quick else ()),
        ]
        given = plan.work / f"{task}.json"
        if who == THEIRS:
            given.write_text(json.dumps(side_settings(load_config(str(CONFIG), settings))), encoding="utf-8")
        for seed in plan.seeds:
            if who == OURS:
                trials.append(run_trial(plan, case, seed, CONFIG, settings, over_time))
            else:
                trials.append(their_trial(plan, case, seed, given, over_time))
    return trials


def sums_data(source: str) -> tuple[str, ...]:
    """Overrides for this data: reasoning-gym's chain_sum with our settings, or a copy of it."""
    settings = (
        (f"data.name={json.dumps(json.dumps(PROBLEMS))}",) if source.startswith("reasoning-gym:") else ()
    )
    return (f"data.source={source}", *settings)


def at_grid(places: Sequence[float], values: Sequence[float], each: float = GRID) -> Curve:
    """The values, interpolated linearly over their times (seconds), at every multiple of `each`."""
    points = np.arange(places[-1] // each + 1) * each
    return tuple(zip(points.tolist(), np.interp(points, places, values).round(4).tolist(), strict=True))


def over_time(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """The held-out reward before and after, the reward over seconds, the median step, and the peak
    memory.

    Only seconds of training count, without start and evaluations, which `TRAINED` does not include
    either.
    """
    scores = [(line["update"], line["eval/reward"]) for line in lines if "eval/reward" in line]
    steps = [line for line in lines if "reward" in line]
    seconds = [sum(step["step_time"] for step in steps[: place + 1]) for place in range(len(steps))]
    rewards = [step["reward"] or 0.0 for step in steps]
    last = rewards[-max(len(rewards) // 10, 1) :]
    problems = min(line["em_subset"] for line in lines if "em_subset" in line)
    found = [
        Figure(name=HELD_OUT_BEFORE, value=scores[0][1], note=f"{problems} problems"),
        Figure(name=HELD_OUT_AFTER, value=scores[-1][1], note=f"{scores[-1][0]} updates"),
        Figure(name=REWARD, value=statistics.fmean(last), curve=at_grid(seconds, rewards)),
        Figure(name=STEP, value=statistics.median(step["step_time"] for step in steps), unit="s"),
        Figure(name=TRAINED, value=seconds[-1], unit="s"),
    ]
    if peaks := [step["memory/peak_gb"] for step in steps if "memory/peak_gb" in step]:
        found.append(Figure(name=PEAK, value=max(peaks), unit="GB"))
    return found


if __name__ == "__main__":
    main()
