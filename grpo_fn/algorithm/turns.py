"""Credit for the steps of a completion (turns, spans): from rewards at their ends to advantages."""

import mlx.core as mx

from grpo_fn.algorithm.advantages import group_advantages
from grpo_fn.algorithm.baselines import BASELINES
from grpo_fn.checks import check_choice, check_rank, check_shape


def turn_advantages(
    rewards_pgs: mx.array,
    *,
    baseline: str = "group_mean",
    scale: str = "group",
    discount: float = 1.0,
    states_pgs: mx.array | None = None,
) -> mx.array:
    """Advantages of the S steps of P·G completions, from a reward at the end of each step.

    With a baseline of rewards (DeepSeekMath's process supervision, arXiv 2402.03300, section 4.1.3):

        A_s = Σ_{k ≥ s} γ^(k−s)·z_k        z = the rewards of all steps, normalised by `group_advantages`

    so that one reward for each completion, at its last step, gives `group_advantages` of these to the bit at
    γ = 1. With `turn` (GiGPO, arXiv 2505.10978, section 4; its ω = 1):

        A_s = A^E + A^S_s                  A^E = the group's advantages of Σ_k r_k
        A^S_s = (R_s − mean)/scale         over the group's steps that start in the same state
        R_s = Σ_{k ≥ s} γ^(k−s)·r_k

    Args:
        rewards_pgs: [P,G,S]; NaN: no reward at that step, or no such step. A completion without any is left
            out.
        baseline: see `group_advantages`.
        scale: the same; with `turn`: `group` (of the state's steps), or `none`.
        discount: γ, 0 to 1.
        states_pgs: for `turn`: the number of the state in which each step starts, integers [P,G,S], compared
            within the group; -1: no such step.

    Returns:
        adv_pgs float32; with `turn` 0 where there is no step.

    Raises:
        ValueError: a name, shape or number is wrong, or states are missing.
    """
    check_rank("rewards_pgs", rewards_pgs, 3)
    check_choice("baseline", baseline, BASELINES)
    if not BASELINES[baseline].by_state:
        return discounted_returns(group_advantages(rewards_pgs, baseline=baseline, scale=scale), discount)
    if states_pgs is None:
        raise ValueError(f"baseline = {baseline!r} compares steps that start in one state: needs states_pgs")
    if scale == "batch":
        raise ValueError(f"scale = 'batch' with baseline = {baseline!r}: expected 'group' or 'none'")
    check_shape("states_pgs", states_pgs, tuple(rewards_pgs.shape))
    groups, size, steps = rewards_pgs.shape
    none_pg1 = mx.isnan(rewards_pgs).all(axis=2, keepdims=True)
    returns_pgs = mx.where(none_pg1, mx.nan, discounted_returns(rewards_pgs, discount))
    episode_pg1 = mx.where(none_pg1, mx.nan, discounted_returns(rewards_pgs, 1.0)[..., :1])
    # a row for each step: the returns of those that start in its state, with its own on the diagonal
    states_pn = states_pgs.reshape(groups, size * steps)
    same_pnn = states_pn[:, :, None] == states_pn[:, None, :]
    mates_pnn = mx.where(same_pnn, returns_pgs.reshape(groups, 1, -1), mx.nan)
    of_state_pnn = group_advantages(mates_pnn.reshape(-1, size * steps), scale=scale).reshape(same_pnn.shape)
    of_state_pgs = mx.diagonal(of_state_pnn, axis1=1, axis2=2).reshape(rewards_pgs.shape)
    adv_pgs = group_advantages(episode_pg1[..., 0], scale=scale)[..., None] + of_state_pgs
    return mx.where(states_pgs >= 0, adv_pgs, 0.0)


def discounted_returns(values_pgs: mx.array, discount: float) -> mx.array:
    """R_s = Σ_{k ≥ s} γ^(k−s)·v_k over the last axis, float32; NaN counts as 0.

    Raises:
        ValueError: γ is not within 0 … 1.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount = {discount}: expected 0 <= discount <= 1")
    values_pgs = values_pgs.astype(mx.float32)
    found = [mx.zeros(values_pgs.shape[:-1])]
    for step in reversed(range(values_pgs.shape[-1])):
        value = values_pgs[..., step]
        found.append(mx.where(mx.isnan(value), 0.0, value) + discount * found[-1])
    return mx.stack(found[:0:-1], axis=-1)
