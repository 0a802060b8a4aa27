"""Baselines and scales for advantages: A = (R − baseline) / scale.

Each function accepts rewards [P,G] (0 if missing) and `given` [P,G] (True if present), and returns
an array that broadcasts to [P,G]. With S steps per completion, both arguments are [P,G,S]. To add a
baseline or a scale, write the function and add a line to BASELINES or SCALES.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

STD_EPSILON = 1e-4  # TRL's; added to a standard deviation before dividing by it
_FLOAT32_EPSILON = 2.0**-23


def leave_one_out(rewards_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns the mean over the group's other completions (RLOO, arXiv 2402.14740 eq. 6)."""
    count_p1 = total(given_pg)
    others_p1 = mx.maximum(count_p1 - 1, 1)
    return (mean(rewards_pg, given_pg) * count_p1 - rewards_pg) / others_p1


def batch_mean(rewards_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns the mean of the batch (GDPO's second normalisation), or exactly 0 if the mean is
    within the rounding error of the sum.

    GDPO's normalised rewards have a mean of 0, so a group without variance must have A = 0, not
    ±1e-8.
    """
    rewards_1b, given_1b = as_one_group(rewards_pg, given_pg)
    mean_11 = mean(rewards_1b, given_1b)
    rounding_11 = _FLOAT32_EPSILON * total(mx.abs(rewards_1b))
    return mx.where(mx.abs(mean_11) > rounding_11, mean_11, 0.0)


def group_scale(rewards_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns the group's standard deviation + 1e-4."""
    return std(rewards_pg, given_pg) + STD_EPSILON


def batch_scale(rewards_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns the batch's standard deviation + 1e-4."""
    rewards_1n, given_1n = as_one_group(rewards_pg, given_pg)
    return group_scale(rewards_1n, given_1n)


def no_scale(rewards_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns 1: advantages have the rewards' unit (Dr. GRPO, arXiv 2503.20783)."""
    return mx.array(1.0)


def as_one_group(rewards_pg: mx.array, given_pg: mx.array) -> tuple[mx.array, mx.array]:
    """Reshapes both arrays to [1,P·G], or [1,P·G,S], so that the batch is a single group."""
    groups, size, *steps = rewards_pg.shape
    shape = (1, groups * size, *steps)
    return rewards_pg.reshape(shape), given_pg.reshape(shape)


def total(values_pg: mx.array) -> mx.array:
    """Returns each group's sum, [P,1] or [P,1,1]. A completion's steps are summed first, so that
    rewards at a single step and rewards without steps give bit-identical results.
    """
    steps = values_pg.sum(axis=2, keepdims=True) if values_pg.ndim == 3 else values_pg
    return steps.sum(axis=1, keepdims=True)


def mean(values_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns the mean of each group's given values, [P,1] or [P,1,1], or 0 if a group has none."""
    return total(values_pg) / mx.maximum(total(given_pg), 1)


def std(values_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns the Bessel-corrected standard deviation of each group's given values, [P,1] or
    [P,1,1], or 0 if a group has fewer than two.
    """
    centred_pg = mx.where(given_pg, values_pg - mean(values_pg, given_pg), 0.0)
    return mx.sqrt(total(mx.square(centred_pg)) / mx.maximum(total(given_pg) - 1, 1))


class Baseline(NamedTuple):
    """A baseline and its properties."""

    function: Callable[[mx.array, mx.array], mx.array]  # (rewards, given) -> what is subtracted
    # whether a completion is compared with the batch, not with its group alone
    of_batch: bool = False
    # whether `turn_advantages` also compares the steps that start in one state
    by_state: bool = False


BASELINES: dict[str, Baseline] = {
    "group_mean": Baseline(mean),
    "leave_one_out": Baseline(leave_one_out),
    "batch_mean": Baseline(batch_mean, of_batch=True),
    "turn": Baseline(mean, by_state=True),
}
SCALES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "group": group_scale,
    "batch": batch_scale,
    "none": no_scale,
}
