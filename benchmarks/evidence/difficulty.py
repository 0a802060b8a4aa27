"""Accuracy over tokens: dynamic sampling, a curriculum that goes by pass rates, and groups in two stages.

The pretrained model in GRPO_REAL_MODEL learns sums of two numbers of one or two digits, of reasoning-gym. It
gets about 13 % of its completions right, and two thirds of the prompts never. All arms have the same settings
but for the draw; those without dynamic sampling, which take fewer tokens an update, take more updates.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import attrs
import click

from benchmarks.evidence.command import ALL_SEEDS, Plan, Trial, evidence, real_settings, run_trial
from benchmarks.evidence.pictures import joined
from benchmarks.evidence.readings import AFTER, BEFORE, TAUGHT, TOKENS, learning, reach
from benchmarks.evidence.real_model import CONFIG, at_grid, sums_data
from benchmarks.evidence.real_tasks import SUMS
from benchmarks.harness.record import Curve, Figure

DYNAMIC, STAGES = "loss.dynamic_sampling=true", "rollout.first_stage=4"
ADAPTIVE = "data.curriculum=adaptive"
ARMS = {
    "plain": (),
    "dynamic sampling": (DYNAMIC,),
    "dynamic sampling, two stages": (DYNAMIC, STAGES),
    "adaptive": (ADAPTIVE,),
    "adaptive, two stages": (ADAPTIVE, STAGES),
    "adaptive, dynamic sampling": (ADAPTIVE, DYNAMIC),
}
USUAL = "dynamic sampling"
WANTED = 0.6  # of its tokens, to its accuracy
MOST = 0.9  # of its gain
LONGER = 3.0  # updates of an arm without dynamic sampling, for one with it: about as many tokens
GRID = 2000.0  # tokens between two points of a curve
QUICK = ("optim.batch_size=2", "eval.samples=4", "eval.every=1")


def summary(figures: Sequence[Figure]) -> list[Figure]:
    """Tokens in which the mean over the seeds comes to dynamic sampling's last accuracy, over its tokens; and
    the same for most of its gain, over its tokens to there."""

    def of(case: str, name: str) -> list[Figure]:
        return [f for f in figures if f.name.startswith(f"{case}: seed") and f.name.endswith(f": {name}")]

    def mean(name: str) -> float:
        return statistics.fmean(figure.value for figure in of(USUAL, name))

    curves = {case: [figure.curve for figure in of(case, AFTER) if figure.curve] for case in ARMS}
    means = {
        case: [(tokens, value) for tokens, value, *_ in joined(found)]
        for case, found in curves.items()
        if found
    }
    if USUAL not in means or mean(TOKENS) <= 5 * GRID:  # too short to say anything
        return []
    before, level, whole, result = mean(BEFORE), mean(AFTER), mean(TOKENS), []
    most = before + MOST * (level - before)
    usual = reach(means.pop(USUAL), most)
    for case, curve in means.items():
        found, soon = reach(curve, level), reach(curve, most)
        result.append(
            Figure(
                name=f"{ALL_SEEDS}: {case}: tokens to the accuracy of dynamic sampling / its tokens",
                value=max(curve[-1][0] / whole, 1.0) if found is None else found / whole,
                unit="x",
                at_most=WANTED if case.startswith("adaptive") else None,
                note=f"{level:.1f} %{' is not reached' if found is None else ''}",
            )
        )
        if usual and soon:
            title = f"{ALL_SEEDS}: {case}: tokens to {most:.1f} % / those of dynamic sampling"
            note = f"{100 * MOST:.0f} % of its gain"
            result.append(Figure(name=title, value=soon / usual, unit="x", note=note))
    return result


@evidence("difficulty", cases=tuple(ARMS), quick_cases=tuple(ARMS)[1:4], seeds="0,1,2", summary=summary)
@click.option("--updates", default=80, show_default=True, help="Of an arm with dynamic sampling.")
@click.option(
    "--sums", default="reasoning-gym:chain_sum", show_default=True, help="The data, or a copy of it."
)
def main(plan: Plan, updates: int, sums: str) -> Sequence[Trial]:
    """Dynamic sampling, adaptive curriculum and two stages on a pretrained model (GRPO_REAL_MODEL)."""
    real = real_settings(plan)
    source = "embedded" if plan.quick else sums
    settings = [
        *real,
        *sums_data(source),
        *SUMS,
        "eval.every=10",
        *(QUICK if plan.quick else ()),
    ]
    trials = []
    for seed, case in itertools.product(plan.seeds if real else (), plan.cases):
        steps = 2 if plan.quick else round(updates * (1 if DYNAMIC in ARMS[case] else LONGER))
        more = (*ARMS[case], f"optim.max_steps={steps}")
        trials.append(run_trial(plan, case, seed, CONFIG, [*settings, *more], over_tokens))
    return trials


def over_tokens(lines: Sequence[dict]) -> list[Figure]:
    """`learning`, with exact match over the tokens sampled so far, and the share of groups that taught."""
    tokens = {line["update"]: line["num_tokens"] for line in lines if "num_tokens" in line}
    shares = [line["groups/taught"] for line in lines if "groups/taught" in line]
    figures = []
    for figure in learning(lines):
        if figure.name == AFTER and figure.curve:
            figure = attrs.evolve(figure, curve=_over(figure.curve, tokens))
        figures.append(figure)
    return [*figures, Figure(name=TAUGHT, value=100 * statistics.fmean(shares), unit="%")]


def _over(curve: Curve, tokens: dict[int, int]) -> Curve:
    seen = [float(tokens.get(int(update), 0)) for update, _ in curve]
    return at_grid(seen, [value for _, value in curve], GRID)


if __name__ == "__main__":
    main()
