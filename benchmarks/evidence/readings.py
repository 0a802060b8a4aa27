"""Reads a run's log as figures: rewards, scores, times, memory, and the sampler's mismatch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.record import Curve, Figure, sample_figure
from benchmarks.harness.runs import Lines
from runners.errors import UserError
from runners.evaluation.comparison import wilson

POINTS = 20  # of a curve in a result
BEFORE, AFTER = "exact match before", "exact match after"
HELD_OUT_BEFORE, HELD_OUT_AFTER = "held-out reward before", "held-out reward after"
REWARD = "reward, last tenth"
SECONDS, STEP, RESIDENT = "from command to end", "step", "resident memory"
TRAINED = "seconds of training"
TOKENS = "tokens sampled"
PEAK = "peak memory of the GPU"
LENGTH = "tokens of a completion, last tenth"
_SAMPLER = {  # the log's name -> figure, unit, factor
    "sampling/sampling_logp_difference/mean": ("mismatch", "nats", 1.0),
    "sampling/effective_sample_size": ("effective sample size", "%", 100.0),
    "sampling/masked_fraction": ("masked tokens", "%", 100.0),
}


def steps_of(lines: Lines) -> list[dict]:
    """The updates in a log that have a reward."""
    return [line for line in lines if line.get("reward") is not None]


def last_tenth(values: Sequence[float]) -> float:
    """The mean of the last tenth of the values."""
    return statistics.fmean(values[-max(len(values) // 10, 1) :])


def over_minutes(lines: Lines) -> list[Figure]:
    """The steps of a log that may be incomplete, with rewards over minutes since the start."""
    steps = steps_of(lines)
    points = [(step["time/elapsed"] / 60, step["reward"]) for step in steps]
    return step_figures(steps, at_grid(points, 0.1, width=9)) if steps else []


def over_time(lines: Lines) -> list[Figure]:
    """Held-out reward and exact match before and after, and rewards over seconds of training.

    The seconds exclude the start and evaluations.
    """
    steps = steps_of(lines)
    if not steps:
        raise UserError("the log has no update with a reward")
    updates = [line for line in lines if "step_time" in line]
    seconds = np.cumsum([each["step_time"] for each in updates]).tolist()
    timed = zip(seconds, updates, strict=True)
    points = [(at, each["reward"]) for at, each in timed if each.get("reward") is not None]
    figures = []
    for key, before, after in (("eval/reward", HELD_OUT_BEFORE, HELD_OUT_AFTER), ("em", BEFORE, AFTER)):
        found = [line for line in lines if key in line]
        unit = "%" if key == "em" else ""
        scale = 100 if unit else 1
        for name, line in ((before, found[0]), (after, found[-1])) if found else ():
            note = f"{line['em_subset']} problems, {line['update']} updates"
            figures.append(Figure(name, scale * line[key], unit, note=note))
    curve = at_grid(points, 2.0)
    trained = Figure(TRAINED, seconds[-1], "s")
    return [*figures, *step_figures(steps, curve), trained]


def step_figures(steps: Lines, curve: Curve) -> list[Figure]:
    """Reward with its curve, the times of a step and its parts, tokens and the peak memory."""
    last = steps[-1]
    figures = [
        Figure("updates", last["update"]),
        Figure(REWARD, last_tenth([step["reward"] for step in steps]), curve=curve),
        sample_figure(STEP, (step["step_time"] for step in steps), "s"),
        Figure(TOKENS, last.get("num_tokens", 0)),
    ]
    for part in ("rollout", "reward", "learner", "update", "sync"):
        values = [step[f"time/{part}"] for step in steps if f"time/{part}" in step]
        figures += [sample_figure(f"step: {part}", values, "s")] if values else []
    peaks = [step["memory/peak_gb"] for step in steps if "memory/peak_gb" in step]
    return [*figures, *([Figure(PEAK, max(peaks), "GB")] if peaks else [])]


def share_figure(name: str, share: float, problems: int, curve: Curve = ()) -> Figure:
    """A share of right answers as a percentage, with its 95 % interval."""
    within = wilson(round(share * problems), problems)
    low, high = 100 * within.low, 100 * within.high
    value = 100 * share
    return Figure(name, value, "%", low=low, high=high, samples=problems, curve=curve)


def sampler(lines: Lines) -> list[Figure]:
    """The difference between sampler and learner, as means over the updates.

    Raises:
        UserError: the run changed its quantization, so the figures belong to two samplers.
    """
    left = [line["rollout/fallback"] for line in lines if line.get("rollout/fallback")]
    if left:
        raise UserError(f"the run went back to full precision: {left[0]}")
    figures = []
    for key, (name, unit, scale) in _SAMPLER.items():
        points = [(line["update"], scale * line[key]) for line in lines if line.get(key) is not None]
        values = [value for _, value in points]
        if values:
            mean = statistics.fmean(values)
            figures.append(sample_figure(name, values, unit, value=mean, curve=thinned(points)))
    return figures


def at_grid(points: Sequence[tuple[float, float]], each: float, width: int = 1) -> Curve:
    """The values, interpolated linearly, at every multiple of `each`, so that the curves of several
    runs can be joined. Each value is first averaged with its neighbours (`width` in total).
    """
    places, values = zip(*points, strict=True)
    half = width // 2
    means = [
        statistics.fmean(values[max(place - half, 0) : place + half + 1]) for place in range(len(values))
    ]
    ticks = range(math.floor(places[0] / each), math.floor(places[-1] / each) + 1)
    grid = [round(tick * each, 6) for tick in ticks]
    return tuple(zip(grid, np.interp(grid, places, means).round(4).tolist(), strict=True))


def thinned(points: Sequence[tuple[float, float]], number: int = POINTS) -> Curve:
    """At most `number` points, each the mean of the same number of neighbours, rounded to five
    digits.
    """
    points = [point for point in points if math.isfinite(point[1])]
    each = max(-(-len(points) // number), 1)
    parts = [points[start : start + each] for start in range(0, len(points), each)]
    means = [np.mean(part, axis=0).tolist() for part in parts]
    return tuple((x, float(f"{y:.5g}")) for x, y in means)
