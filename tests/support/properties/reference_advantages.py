"""The specification of rewards → advantages in plain Python and NumPy float64; see reference.py."""

import math

import numpy as np

from tests.support.reference import STD_FLOOR


def std(values):
    """Standard deviation with Bessel's correction (n − 1), as TRL's `torch.std`."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def spread(values):
    """`std`, which is 0 for a single value."""
    return std(values) if len(values) > 1 else 0.0


def standardised(values):
    """(v − mean)/(std + 1e-4); exactly 0 where the values do not differ, or there are fewer than two."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean, spread = sum(values) / len(values), std(values)
    return [(v - mean) / (spread + STD_FLOOR) for v in values]


def combine_rewards(rewards, weights, *, aggregate="sum_then_normalize", group_size=None):
    """R_i = Σ_k w_k r_k(i) over the rewards that exist; GDPO normalises each function in its group first."""
    kinds, rows = rewards.shape
    terms = rewards.astype(np.float64).copy()
    if aggregate == "normalize_then_sum":
        for k in range(kinds):
            for start in range(0, rows, group_size):
                given = [i for i in range(start, start + group_size) if not math.isnan(rewards[k, i])]
                for i, z in zip(given, standardised([float(rewards[k, i]) for i in given]), strict=True):
                    terms[k, i] = z
    total = np.full(rows, np.nan)
    for i in range(rows):
        given = [k for k in range(kinds) if not math.isnan(rewards[k, i])]
        if given:
            total[i] = sum(weights[k] * terms[k, i] for k in given)
    return total


def group_advantages(rewards, *, baseline="group_mean", scale="group", valid=None):
    """A = (R − baseline)/scale over valid rewards; 0 for the others and where nothing compared differs.

    What is compared: the rewards of the group with a group's baseline, those of the batch with the batch's.
    """
    prompts, size = rewards.shape
    valid = np.ones((prompts, size), bool) if valid is None else np.asarray(valid, bool)
    valid = valid & ~np.isnan(rewards)
    everything = [float(r) for r in rewards[valid]]
    adv = np.zeros((prompts, size))
    for p in range(prompts):
        given = [g for g in range(size) if valid[p, g]]
        values = [float(rewards[p, g]) for g in given]
        if len(set(everything if baseline == "batch_mean" else values)) < 2:
            continue
        for g in given:
            r = float(rewards[p, g])
            if baseline == "group_mean":
                base = sum(values) / len(values)
            elif baseline == "leave_one_out":
                base = (sum(values) - r) / (len(values) - 1)
            else:
                base = sum(everything) / len(everything)
            among = {"group": values, "batch": everything}.get(scale)
            adv[p, g] = (r - base) / (1.0 if among is None else spread(among) + STD_FLOOR)
    return adv


def overlong_penalty(length, max_length, buffer, factor=1.0):
    """DAPO eq. 13: 0, then a straight line over the buffer, then −1; times `factor`."""
    allowed = max_length - buffer
    if length <= allowed:
        return 0.0
    if length <= max_length:
        return factor * (allowed - length) / buffer
    return -factor
