"""Computes advantages from rewards: combines reward functions, subtracts baselines, scales, and
credits steps (turns).
"""

import mlx.core as mx

from grpo_fn.algorithm.baselines import BASELINES, SCALES, STD_EPSILON, as_one_group, mean, std
from grpo_fn.checks import check_choice, check_rank, check_shape

AGGREGATES = ("sum_then_normalize", "normalize_then_sum")
LARGEST_REWARD = 1e15  # its square, and a sum of such squares, fit into float32


def combine_rewards(
    rewards_kb: mx.array,
    weights_k: mx.array,
    *,
    aggregate: str = "sum_then_normalize",
    group_size: int | None = None,
) -> mx.array:
    """Computes R_i = Σ_k w_k r_k(i) over the reward functions that scored completion i.

    Args:
        rewards_kb: [K,B], one row per reward function; NaN, an infinite value or a value beyond
            ±1e15 means no reward.
        weights_k: [K].
        aggregate: `sum_then_normalize`: the plain sum; `normalize_then_sum` (GDPO, arXiv
            2601.05242): each function is first normalised within its group, z = (r − mean)/(std +
            1e-4), Bessel-corrected.
        group_size: G, completions per prompt (B = P·G, row p·G + g); required by
            `normalize_then_sum`.

    Returns:
        rewards_b float32; NaN where no function returned a reward.

    Raises:
        ValueError: a shape, the name or the group size is invalid.
    """
    check_rank("rewards_kb", rewards_kb, 2)
    check_shape("weights_k", weights_k, rewards_kb.shape[:1])
    check_choice("aggregate", aggregate, AGGREGATES)
    rewards_kb = rewards_kb.astype(mx.float32)
    given_kb = _given(rewards_kb)
    values_kb = mx.where(given_kb, rewards_kb, 0.0)
    if aggregate == "normalize_then_sum":
        functions, size = rewards_kb.shape
        if group_size is None or group_size < 2 or size % group_size:
            raise ValueError(
                "aggregate = 'normalize_then_sum' normalises within groups: expected group_size "
                f">= 2 that divides {size} completions, found {group_size}"
            )
        shape_rows = (functions * size // group_size, group_size)
        values_kb = _standardised(values_kb.reshape(shape_rows), given_kb.reshape(shape_rows))
        values_kb = values_kb.reshape(functions, size)
    total_b = (values_kb * weights_k.astype(mx.float32)[:, None]).sum(axis=0)
    return mx.where(given_kb.any(axis=0), total_b, mx.nan)


def group_advantages(
    rewards_pg: mx.array,
    *,
    baseline: str = "group_mean",
    scale: str = "group",
    valid_pg: mx.array | None = None,
) -> mx.array:
    """Computes the advantages for P groups of G completions.

    Args:
        rewards_pg: [P,G], or [P,G,S] for rewards at S steps of each completion; all steps of a
            group are compared with each other. NaN, an infinite value or a value beyond ±1e15 means
            no reward.
        baseline: `group_mean` (GRPO), `leave_one_out` (RLOO, arXiv 2402.14740 eq. 6), `batch_mean`
            (GDPO's second normalisation), or `turn`, which is `group_mean` here: see
            `turn_advantages`.
        scale: `group` divides by the group's standard deviation + 1e-4, `batch` by the batch's, and
            `none` does not divide (Dr. GRPO). Bessel-corrected, as in TRL. With `batch_mean` use
            `batch` or `none`: the deviation of a group without variance is 0.
        valid_pg: False for completions (or steps) to exclude; those without a reward are always
            excluded.

    Returns:
        adv_pg float32, of the rewards' shape. An excluded completion has the advantage 0 and does
        not affect its group's statistics. With a group baseline, all advantages of a group are
        exactly 0 if its rewards are equal or it has fewer than two. With `batch_mean`, the
        advantages in such a group are R − (the batch's mean); advantages are exactly 0 only if all
        rewards of the batch are equal.

    Raises:
        ValueError: a name or shape is invalid, or G < 2 with a group baseline.
    """
    check_rank("rewards_pg", rewards_pg, 3 if rewards_pg.ndim == 3 else 2)
    check_choice("baseline", baseline, BASELINES)
    check_choice("scale", scale, SCALES)
    size = rewards_pg.shape[1]
    of_batch = BASELINES[baseline].of_batch
    if size < 2 and not of_batch:
        raise ValueError(
            f"baseline = {baseline!r} requires at least 2 completions per prompt, found {size}"
        )
    rewards_pg = rewards_pg.astype(mx.float32)
    given_pg = _given(rewards_pg)
    if valid_pg is not None:
        check_shape("valid_pg", valid_pg, tuple(rewards_pg.shape))
        given_pg = given_pg & valid_pg.astype(mx.bool_)
    rewards_pg = mx.where(given_pg, rewards_pg, 0.0)

    base_pg = BASELINES[baseline].function(rewards_pg, given_pg)
    adv_pg = (rewards_pg - base_pg) / SCALES[scale](rewards_pg, given_pg)
    compared = as_one_group(rewards_pg, given_pg) if of_batch else (rewards_pg, given_pg)
    return mx.where(given_pg & _varies(compared[0], compared[1]), adv_pg, 0.0)


def turn_advantages(
    rewards_pgs: mx.array,
    *,
    baseline: str = "group_mean",
    scale: str = "group",
    discount: float = 1.0,
    states_pgs: mx.array | None = None,
) -> mx.array:
    """Computes the advantage of each of S steps in P·G completions, from a reward at the end of
    each step.

    With a baseline of rewards (DeepSeekMath's process supervision, arXiv 2402.03300, section
    4.1.3):

        A_s = Σ_{k ≥ s} γ^(k−s)·z_k        z = the rewards of all steps, normalised by
                                           `group_advantages`

    With γ = 1 and one reward per completion, at its last step, the result is exactly that of
    `group_advantages`. With `turn` (GiGPO, arXiv 2505.10978, section 4; its ω = 1):

        A_s = A^E + A^S_s                  A^E = the group's advantages of Σ_k r_k
        A^S_s = (R_s − mean)/scale         over the group's steps that start in the same state
        R_s = Σ_{k ≥ s} γ^(k−s)·r_k

    Args:
        rewards_pgs: [P,G,S]; NaN, an infinite value or a value beyond ±1e15 means that the step has
            no reward or does not exist. A completion without any reward is excluded.
        baseline: see `group_advantages`.
        scale: see `group_advantages`; with `turn`, `group` (of the state's steps) or `none`.
        discount: γ, 0 to 1.
        states_pgs: for `turn`: the number of the state in which each step starts, integers [P,G,S],
            compared within the group; -1 means that the step does not exist.

    Returns:
        adv_pgs float32; with `turn`, advantages are 0 where there is no step.

    Raises:
        ValueError: a name, shape or number is invalid, or states are missing.
    """
    check_rank("rewards_pgs", rewards_pgs, 3)
    check_choice("baseline", baseline, BASELINES)
    if not rewards_pgs.size:
        return rewards_pgs.astype(mx.float32)
    if not BASELINES[baseline].by_state:
        return discounted_returns(
            group_advantages(rewards_pgs, baseline=baseline, scale=scale), discount
        )
    if states_pgs is None:
        raise ValueError(
            f"baseline = {baseline!r} compares steps that start in the same state: it requires "
            "states_pgs"
        )
    if scale == "batch":
        raise ValueError(
            f"scale = 'batch' with baseline = {baseline!r}: expected 'group' or 'none'"
        )
    check_shape("states_pgs", states_pgs, tuple(rewards_pgs.shape))
    groups, size, steps = rewards_pgs.shape
    none_pg1 = mx.logical_not(_given(rewards_pgs).any(axis=2, keepdims=True))
    returns_pgs = mx.where(none_pg1, mx.nan, discounted_returns(rewards_pgs, discount))
    episode_pg1 = mx.where(none_pg1, mx.nan, discounted_returns(rewards_pgs, 1.0)[..., :1])
    # a row for each step: the returns of all steps that start in the same state, its own on the
    # diagonal
    states_pn = states_pgs.reshape(groups, size * steps)
    same_pnn = states_pn[:, :, None] == states_pn[:, None, :]
    mates_pnn = mx.where(same_pnn, returns_pgs.reshape(groups, 1, -1), mx.nan)
    of_state_pnn = group_advantages(mates_pnn.reshape(-1, size * steps), scale=scale).reshape(
        same_pnn.shape
    )
    of_state_pgs = mx.diagonal(of_state_pnn, axis1=1, axis2=2).reshape(rewards_pgs.shape)
    adv_pgs = group_advantages(episode_pg1[..., 0], scale=scale)[..., None] + of_state_pgs
    return mx.where(states_pgs >= 0, adv_pgs, 0.0)


def discounted_returns(values_pgs: mx.array, discount: float) -> mx.array:
    """Computes R_s = Σ_{k ≥ s} γ^(k−s)·v_k along the last axis, in float32. NaN, infinite values
    and values beyond ±1e15 count as 0.

    Raises:
        ValueError: γ is not within 0 … 1.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount = {discount}: expected 0 <= discount <= 1")
    values_pgs = values_pgs.astype(mx.float32)
    values_pgs = mx.where(_given(values_pgs), values_pgs, 0.0)
    if not values_pgs.size:
        return values_pgs
    found = [mx.zeros(values_pgs.shape[:-1])]
    for step in reversed(range(values_pgs.shape[-1])):
        found.append(values_pgs[..., step] + discount * found[-1])
    return mx.stack(found[:0:-1], axis=-1)


def overlong_penalty(
    lengths_b: mx.array, max_length: int, buffer: int, factor: float = 1.0
) -> mx.array:
    """Computes DAPO's soft penalty on long completions (arXiv 2503.14476, eq. 13), at most 0,
    float32 [B].

    The penalty is 0 up to `max_length − buffer` tokens, falls linearly to −`factor` at
    `max_length`, and stays constant beyond.

    Raises:
        ValueError: the buffer is not within 1 … max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer = {buffer}: expected 1 <= buffer <= max_length = {max_length}")
    free = max_length - buffer
    penalty_b = mx.minimum((free - lengths_b.astype(mx.float32)) / buffer, 0.0)
    return factor * mx.maximum(penalty_b, -1.0)


def has_varied_rewards(rewards_pg: mx.array) -> mx.array:
    """Returns whether each group's rewards differ, bool [P]. With a group baseline, only groups
    whose rewards differ have a gradient.

    Args:
        rewards_pg: [P,G]; NaN, an infinite value or a value beyond ±1e15 means no reward.
    """
    check_rank("rewards_pg", rewards_pg, 2)
    rewards_pg = rewards_pg.astype(mx.float32)
    return _varies(rewards_pg, _given(rewards_pg))[:, 0]


def _given(rewards: mx.array) -> mx.array:
    """Returns whether each value is a reward: not NaN, not infinite, and small enough to be
    squared.
    """
    return mx.abs(rewards) <= LARGEST_REWARD


def _varies(values_pg: mx.array, given_pg: mx.array) -> mx.array:
    """Returns whether each group's given values differ, [P,1] or [P,1,1]. The comparison is exact,
    whereas a variance would have rounding errors.
    """
    axes = tuple(range(1, values_pg.ndim))
    if not values_pg.size:
        return mx.zeros((values_pg.shape[0], *(1 for _ in axes)), mx.bool_)
    least_p1 = mx.where(given_pg, values_pg, mx.inf).min(axis=axes, keepdims=True)
    return mx.where(given_pg, values_pg, -mx.inf).max(axis=axes, keepdims=True) > least_p1


def _standardised(values_pg: mx.array, given_pg: mx.array) -> mx.array:
    z_pg = (values_pg - mean(values_pg, given_pg)) / (std(values_pg, given_pg) + STD_EPSILON)
    return mx.where(given_pg & _varies(values_pg, given_pg), z_pg, 0.0)
