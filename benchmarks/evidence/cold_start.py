"""A model that is hardly ever right: GRPO alone, supervised updates alone, and one after the other.

The pretrained model in GRPO_REAL_MODEL learns GSM8K, of which it gets one or two per cent right. Supervised
updates are on the data's own solutions. Accuracy is exact match on test problems, over the tokens that were
sampled or learned as gold, with 95 % intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, real_settings, run_trial
from benchmarks.evidence.readings import AFTER, BEFORE, TOKENS
from benchmarks.evidence.real_model import CONFIG, TRAINED, at_grid
from benchmarks.evidence.real_tasks import TASKS
from benchmarks.harness.record import Figure
from runners.evaluation.comparison import wilson

SFT, BOTH = "SFT alone", "SFT, then GRPO"
ADAPTIVE = "data.curriculum=adaptive"
LARGE = ("optim.batch_size=32", "rollout.num_generations=16", "sft.batch_size=128")  # four times the rows
# Name -> (supervised updates, updates of GRPO), in --updates; further settings.
ARMS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "GRPO alone": (0, 1, ()),
    SFT: (1, 0, ()),
    "SFT alone, twice as long": (2, 0, ()),
    BOTH: (1, 1, ()),
    "SFT, then GRPO, adaptive": (1, 1, (ADAPTIVE,)),
    "SFT, then GRPO, adaptive, long": (2, 3, (ADAPTIVE, *LARGE, "optim.learning_rate=3e-6")),
}
WANTED = 3.0  # times the accuracy before training
LOSS_BEFORE, LOSS_AFTER = "held-out loss before", "held-out loss after"
QUICK = ("optim.batch_size=2", "eval.samples=4", "rollout.max_new_tokens=64")
GRID = 5000.0  # tokens between two points of a curve


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """Accuracy over that before training, and its distance from supervised updates alone, all seeds."""
    result = []
    base, alone = _pooled(figures, BEFORE), _pooled(figures, AFTER, SFT)
    for case in ARMS:
        found = _pooled(figures, AFTER, case)
        if not found or not base or not base[0]:
            continue
        ratio = found[0] / found[1] / (base[0] / base[1])
        target = WANTED if case.startswith(BOTH) else None
        title = f"{ALL_SEEDS}: {case}: accuracy / before training"
        result.append(Figure(name=title, value=ratio, unit="x", at_least=target))
        if case.startswith(BOTH) and alone:
            title = f"{ALL_SEEDS}: {case}: accuracy above {SFT}"
            points, half = _difference(found, alone)
            known = {"low": points - half, "high": points + half, "note": f"± {half:.1f} points (95 %)"}
            result.append(Figure(name=title, value=points, unit="points", at_least=half, **known))
    return result


def _pooled(figures: Sequence[Figure], name: str, case: str = "") -> tuple[int, int] | None:
    """(right, all) answers of a case, or of all of them, over its seeds."""
    found = [f for f in figures if f.name.endswith(f": {name}") and ": seed " in f.name]
    found = [f for f in found if f.name.startswith(f"{case}: ")] if case else found
    if not found:
        return None
    total = sum(f.samples for f in found)
    return round(sum(f.value / 100 * f.samples for f in found)), total


def _difference(one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
    """The difference of two shares in points, and half of its 95 % interval."""
    shares = [right / total for right, total in (one, other)]
    spread = sum(p * (1 - p) / total for p, (_, total) in zip(shares, (one, other), strict=True))
    return 100 * (shares[0] - shares[1]), 196 * math.sqrt(spread)


@evidence("cold_start", cases=tuple(ARMS), quick_cases=(BOTH,), seeds="0,1,2", summary=summary)
@click.option("--updates", default=40, show_default=True, help="Of each phase of an arm.")
@click.option("--rate", default=1e-4, show_default=True, help="The supervised updates' learning rate.")
@click.option("--gsm8k", default="openai/gsm8k", show_default=True, help="The data, or a copy of it.")
def main(plan: Plan, updates: int, rate: float, gsm8k: str) -> Sequence[Trial]:
    """GRPO and supervised updates on a pretrained model (GRPO_REAL_MODEL) that is hardly ever right."""
    real = real_settings(plan)
    trials, each = [], 2 if plan.quick else updates
    for case, seed in itertools.product(plan.cases if real else (), plan.seeds):
        supervised, grpo, more = ARMS[case]
        settings = [
            *real,
            *TASKS["GSM8K"],
            f"data.source={'embedded' if plan.quick else gsm8k}",
            "eval.samples=500",
            f"eval.every={max(each // 2, 1)}",
            f"sft.updates={supervised * each}",
            f"sft.only={str(not grpo).lower()}",
            f"sft.learning_rate={rate}",
            f"optim.max_steps={max(grpo, 1) * each}",
            *more,
            *((*QUICK, "data.eval_split=valid") if plan.quick else ()),
        ]
        trials.append(run_trial(plan, case, seed, CONFIG, settings, accuracy))
    return trials


def accuracy(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """Exact match before and after with intervals and its curve over tokens; tokens, seconds, losses."""
    steps = [line for line in lines if "grad_norm" in line]
    evaluations = [line for line in lines if "em" in line]
    tokens = {line["update"]: line["num_tokens"] for line in steps}
    seen = [float(tokens.get(line["update"], 0)) for line in evaluations]
    curve = at_grid(seen, [100 * line["em"] for line in evaluations], GRID)
    losses = [line["eval/loss"] for line in evaluations if "eval/loss" in line]
    ends = zip((LOSS_BEFORE, LOSS_AFTER), losses[:1] + losses[-1:], strict=False)
    seconds = sum(line["step_time"] for line in steps)
    return [
        _share(BEFORE, evaluations[0]),
        _share(AFTER, evaluations[-1], curve=curve),
        Figure(name=TOKENS, value=steps[-1]["num_tokens"]),
        Figure(name=TRAINED, value=seconds, unit="s"),
        *(Figure(name=name, value=loss, unit="nats") for name, loss in ends),
    ]


def _share(name: str, line: dict[str, Any], **more: Any) -> Figure:
    """Exact match of an evaluation in per cent, with its 95 % interval."""
    problems = line["em_subset"]
    within = wilson(round(line["em"] * problems), problems)
    low, high = 100 * within.low, 100 * within.high
    return Figure(name=name, value=100 * line["em"], unit="%", low=low, high=high, samples=problems, **more)


if __name__ == "__main__":
    main()
