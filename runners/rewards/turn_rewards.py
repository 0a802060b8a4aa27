"""Rewards of turns, from an environment's `get_turn_rewards`, and the advantages that they give."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.algorithm import BASELINES
from runners.config.sections import LossConfig
from runners.rewards.calls import TURN_REWARDS
from runners.rewards.experience import Experience
from runners.rewards.scoring import Scores


def check_turn_rewards(scores: Scores, rollout: g.Rollout) -> list[str]:
    """A line if there are more rewards than turns. Without the last reward in `scores`, a row has no rewards
    of turns either."""
    column = scores.extras.setdefault(TURN_REWARDS, [None] * scores.values_kb.shape[1])
    turns_b = np.array(rollout.turn_numbers()).max(axis=1) + 1
    lengths = [len(row or ()) for row in column]
    excess = [row for row, turns in enumerate(turns_b) if lengths[row] > turns]
    scores.values_kb[-1, excess] = np.nan
    for row in np.flatnonzero(np.isnan(scores.values_kb[-1])):
        column[row] = None
    if not excess:
        return []
    row, more = excess[0], f" and {len(excess) - 1} more" if len(excess) > 1 else ""
    return [
        f"get_turn_rewards: expected at most {turns_b[row]} numbers, one for each of the model's turns, "
        f"found {lengths[row]}, at completion {row}{more}: no reward from it"
    ]


def advantages_of(experience: Experience, loss: LossConfig, *, with_turn_rewards: bool) -> mx.array:
    """The advantages of completions [P,G], or of their turns [P,G,S] if rewards, discount or baseline tell
    turns apart."""
    assert loss.baseline is not None and loss.scale is not None  # Config.check
    rewards_pg, rollout = experience.rewards_pg, experience.rollout
    by_turn = with_turn_rewards or loss.discount < 1 or BASELINES[loss.baseline].by_state
    if experience.played is None or not by_turn:
        rewards = mx.array(rewards_pg.astype(np.float32))
        return g.group_advantages(rewards, baseline=loss.baseline, scale=loss.scale)
    states_pgs = rollout.turn_states()
    column = experience.extras[TURN_REWARDS] if with_turn_rewards else [None] * rewards_pg.size
    others_kb = experience.values_kb[:-1] if with_turn_rewards else experience.values_kb
    rewards_bs = np.full((rewards_pg.size, states_pgs.shape[2]), np.nan)
    last_b = np.maximum((np.array(states_pgs) >= 0).sum(axis=2).reshape(-1) - 1, 0)
    for row, (own, total) in enumerate(zip(column, rewards_pg.reshape(-1), strict=True)):
        own_s = np.array(own or [], np.float64)  # None becomes NaN
        rewards_bs[row, : len(own_s)] = own_s
        if experience.penalty_b is not None or not np.isnan(others_kb[:, row]).all():
            at_end = np.nan_to_num(rewards_bs[row, last_b[row]]) + total - np.nansum(own_s)
            rewards_bs[row, last_b[row]] = at_end
    return g.turn_advantages(
        mx.array(rewards_bs.astype(np.float32)).reshape(states_pgs.shape),
        baseline=loss.baseline,
        scale=loss.scale,
        discount=loss.discount,
        states_pgs=states_pgs,
    )
