"""Reads a run's log as figures: exact match, reward, tokens, time, the sampler's mismatch."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Curve, Figure
from runners.errors import UserError

POINTS = 20  # of a curve in a result
ENOUGH = 80.0  # per cent exact match: the updates that it takes to get there are a figure
BEFORE, AFTER = "exact match before", "exact match after"
HELD_OUT_BEFORE, HELD_OUT_AFTER = "held-out reward before", "held-out reward after"
REWARD = "reward, last tenth"
TO_ENOUGH = f"updates to {ENOUGH:.0f} %"
SECONDS, STEP, RESIDENT = "from command to end", "step", "resident memory"
TOKENS = "tokens sampled"
TAUGHT = "groups that taught"
PEAK = "peak memory of the GPU"
LENGTH = "tokens of a completion, last tenth"
MISMATCH, SAMPLE_SIZE, MASKED = "mismatch", "effective sample size", "masked tokens"
SYNC = "time of a sync"
_SAMPLER = {  # the log's name -> figure, unit, factor
    "sampling/sampling_logp_difference/mean": (MISMATCH, "nats", 1.0),
    "sampling/effective_sample_size": (SAMPLE_SIZE, "%", 100.0),
    "sampling/masked_fraction": (MASKED, "%", 100.0),
}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log.

    Raises:
        UserError: there is no log, or it contains neither two evaluations nor an update.
    """
    path = folder / "training_log.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist: the run did not reach its first log entry")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    evaluations = sum("em_subset" in line for line in lines)
    if evaluations < 2 or not any("reward" in line or "loss" in line for line in lines):
        raise UserError(f"{path} has {evaluations} evaluations: expected one before and one after training")
    return lines


def learning(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """Exact match and reward with their curves, the updates to 80 %, tokens and the median step."""
    scores = tuple((line["update"], 100 * line["em"]) for line in lines if "em" in line)
    steps = [line for line in lines if "reward" in line]
    rewards = tuple((step["update"], step["reward"]) for step in steps if step["reward"] is not None)
    last = [reward for _, reward in rewards[-max(len(rewards) // 10, 1) :]]
    problems = min(line["em_subset"] for line in lines if "em" in line)
    figures = [
        Figure(name=BEFORE, value=scores[0][1], unit="%", note=f"{problems} problems"),
        Figure(name=AFTER, value=scores[-1][1], unit="%", note=f"{scores[-1][0]} updates", curve=scores),
        Figure(name=REWARD, value=statistics.fmean(last), curve=thinned(rewards)),
        Figure(name=STEP, value=statistics.median(step["step_time"] for step in steps), unit="s"),
    ]
    reached = reach(scores, ENOUGH)
    if reached is not None:
        figures.append(Figure(name=TO_ENOUGH, value=reached))
    if "num_tokens" in steps[-1]:
        figures.append(Figure(name=TOKENS, value=steps[-1]["num_tokens"]))
    return figures


def sampler(lines: Sequence[dict[str, Any]]) -> list[Figure]:
    """The difference between sampler and learner, as means over the updates.

    Raises:
        UserError: the run changed its quantization, so the figures belong to two samplers.
    """
    left = [line["rollout/fallback"] for line in lines if line.get("rollout/fallback")]
    if left:
        raise UserError(f"the run went back to full precision: {left[0]}")
    figures = []
    for key, (name, unit, scale) in _SAMPLER.items():
        points = tuple((line["update"], scale * line[key]) for line in lines if line.get(key) is not None)
        if points:
            values = [value for _, value in points]
            curve = thinned(points)
            mean = statistics.fmean(values)
            figures.append(
                Figure(
                    name=name,
                    value=mean,
                    unit=unit,
                    low=min(values),
                    high=max(values),
                    samples=len(values),
                    curve=curve,
                )
            )
    return figures


def reach(scores: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """The update at which the straight line between two evaluations first reaches `wanted`; None if
    it never does.
    """
    for (start, low), (end, high) in itertools.pairwise(scores):
        if low >= wanted:
            return start
        if high >= wanted:
            return start + (end - start) * (wanted - low) / (high - low)
    return None


def thinned(points: Sequence[tuple[float, float]], number: int = POINTS) -> Curve:
    """At most `number` points, each the mean of the same number of neighbours, rounded to five
    digits.
    """
    points = [point for point in points if math.isfinite(point[1])]
    each = max(-(-len(points) // number), 1)
    parts = [points[start : start + each] for start in range(0, len(points), each)]
    return tuple(
        (statistics.fmean(x for x, _ in part), float(f"{statistics.fmean(y for _, y in part):.5g}"))
        for part in parts
    )
