"""combine_rewards, group_advantages and overlong_penalty against the specification, and their invariances."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn.algorithm import BASELINES as REGISTERED
from grpo_fn.algorithm import SCALES as REGISTERED_SCALES
from grpo_fn.algorithm import Baseline, discounted_returns, has_varied_rewards
from tests.support.properties import reference_advantages as reference
from tests.support.properties.strategies import reward_groups

BASELINES = ("group_mean", "leave_one_out", "batch_mean")
SCALES = ("group", "batch", "none")
seeds = st.integers(0, 2**32 - 1)
THREE_GROUPS = [[1, 1], [0, 0], [1, 0]]
FROM_HALF = np.array([[0.5, 0.5], [-0.5, -0.5], [0.5, -0.5]])


def advantages(rewards, **options):
    """group_advantages as NumPy float64."""
    return np.array(g.group_advantages(mx.array(rewards), **options)).astype(np.float64)


@given(
    rewards=reward_groups(), baseline=st.sampled_from(BASELINES), scale=st.sampled_from(SCALES), seed=seeds
)
def test_advantages_match_the_reference(rewards, baseline, scale, seed):
    """Every baseline × scale, with missing rewards and an extra validity mask."""
    valid = np.random.default_rng(seed).random(rewards.shape) < 0.8 if seed % 2 else None
    got = advantages(
        rewards, baseline=baseline, scale=scale, valid_pg=None if valid is None else mx.array(valid)
    )
    want = reference.group_advantages(rewards, baseline=baseline, scale=scale, valid=valid)
    # A group without variance, divided by its own deviation, is divided by the floor alone.
    size = 1e4 if baseline == "batch_mean" and scale == "group" else 1.0
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * size)


@given(
    size=st.integers(2, 9),
    value=st.floats(-1e3, 1e3, width=32),
    name=st.sampled_from(BASELINES),
    scale=st.sampled_from(SCALES),
)
def test_equal_rewards_give_exactly_zero(size, value, name, scale):
    """Equal rewards of a group (of the batch, with its baseline) give A = 0 exactly; so does GDPO."""
    rewards = np.full((2, size), value, np.float32)
    total = combined(rewards[:1], np.ones(1), aggregate="normalize_then_sum", group_size=size)
    assert (total == 0.0).all()
    others_vary = name != "batch_mean"
    rewards[1, 0] += np.float32(abs(value) + 1.0) * others_vary
    adv = advantages(rewards, baseline=name, scale=scale)
    assert (adv[0] == 0.0).all() and (adv[1] != 0.0).any() == others_vary


@given(rewards=reward_groups(missing=False), seed=seeds, penalty=st.booleans())
def test_gdpo_leaves_groups_without_variance_exactly_zero(rewards, seed, penalty):
    """Such a group has A = 0 exactly, unless a length penalty was added to its normalized rewards."""
    rewards = np.concatenate([rewards, np.full_like(rewards[:1], 0.75)])
    assume(any(len(set(group)) > 1 for group in rewards))
    rng = np.random.default_rng(seed)
    second = rng.integers(0, 3, rewards.shape).astype(np.float32)
    second[-1] = 2.0
    total = combined(
        np.stack([rewards.reshape(-1), second.reshape(-1)]),
        np.array([1.0, 0.3], np.float32),
        aggregate="normalize_then_sum",
        group_size=rewards.shape[1],
    )
    if penalty:
        total[0] -= 0.5
    adv = advantages(total.reshape(rewards.shape).astype(np.float32), baseline="batch_mean", scale="batch")
    assert (adv[-1] > 0.0).all() if penalty else (adv[-1] == 0.0).all()


@given(rewards=reward_groups(prompts=1), name=st.sampled_from(BASELINES), scale=st.sampled_from(SCALES))
def test_invalid_completions_are_as_if_deleted(rewards, name, scale):
    """A NaN or invalid completion has A = 0; the others are what they would be without it."""
    assume(np.isfinite(rewards).sum() >= 2)
    kept = np.isfinite(rewards[0])
    adv = advantages(rewards, baseline=name, scale=scale)
    alone = advantages(rewards[:, kept], baseline=name, scale=scale)
    assert (adv[0, ~kept] == 0.0).all()
    np.testing.assert_allclose(adv[0, kept], alone[0], rtol=1e-6, atol=1e-6)
    filled = np.where(kept, rewards, np.float32(7e7))
    by_mask = advantages(filled, baseline=name, scale=scale, valid_pg=mx.array(kept[None]))
    np.testing.assert_array_equal(by_mask, adv)


@pytest.mark.parametrize(
    ("rewards", "options", "wanted"),
    [
        # mean 1.5, std √(5/3) = 1.2909944; leave-one-out means 2, 5/3, 4/3, 1
        ([[0, 1, 2, 3]], {}, np.array([[-1.5, -0.5, 0.5, 1.5]]) / (1.2909944 + 1e-4)),
        ([[0, 1, 2, 3]], dict(scale="none"), [[-1.5, -0.5, 0.5, 1.5]]),
        ([[0, 1, 2, 3]], dict(baseline="leave_one_out", scale="none"), [[-2.0, -2 / 3, 2 / 3, 2.0]]),
        # the batch's std, √(14/3) = 2.1602469, divides both groups' deviations
        ([[0, 2], [1, 5]], dict(scale="batch"), np.array([[-1, 1], [-2, 2]]) / (2.1602469 + 1e-4)),
        # the batch's mean is ½, its std √0.3 = 0.5477226: groups without variance move too
        (THREE_GROUPS, dict(baseline="batch_mean", scale="none"), FROM_HALF),
        (THREE_GROUPS, dict(baseline="batch_mean", scale="batch"), FROM_HALF / (0.5477226 + 1e-4)),
        # one completion a prompt: A = R − 2
        ([[0], [1], [5]], dict(baseline="batch_mean", scale="none"), [[-2.0], [-1.0], [3.0]]),
    ],
)
def test_advantages_by_hand(rewards, options, wanted):
    """Each baseline and scale."""
    np.testing.assert_allclose(advantages(np.array(rewards, np.float32), **options), wanted, rtol=1e-6)


SIX = mx.zeros((2, 6)), mx.ones(2)
GDPO = {"aggregate": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: g.group_advantages(mx.zeros((3, 1))), "group_mean.*at least 2.*found 1"),
        (lambda: g.group_advantages(mx.zeros((3, 1)), baseline="leave_one_out"), "leave_one_out.*found 1"),
        (lambda: g.group_advantages(*SIX[:1], baseline="group_men"), "group_men.*did you mean 'group_mean'"),
        (lambda: g.group_advantages(*SIX[:1], scale="groups"), "scale.*groups.*did you mean 'group'"),
        (lambda: g.group_advantages(*SIX[:1], valid_pg=mx.ones((2, 1))), r"valid_pg.*\(2, 1\).*\(2, 6\)"),
        *[
            (
                partial(g.combine_rewards, *SIX, aggregate="normalize_then_sum", group_size=n),
                f"group_size.*{n}",
            )
            for n in (None, 1, 4)
        ],
        *[(partial(g.overlong_penalty, mx.array([10]), 25, n), f"buffer = {n}.*25") for n in (0, -1, 26)],
    ],
)
def test_what_does_not_fit_is_refused(act, message):
    """The message gives the nearest spelling, or what was found and what is expected."""
    with pytest.raises(ValueError, match=message):
        act()


def combined(rewards, weights, **options):
    """combine_rewards as NumPy float64."""
    return np.array(g.combine_rewards(mx.array(rewards), mx.array(weights), **options)).astype(np.float64)


@given(data=st.data(), aggregate=st.sampled_from(["sum_then_normalize", "normalize_then_sum"]), seed=seeds)
def test_combined_rewards_match_the_reference(data, aggregate, seed):
    """Any number of reward functions with missing values; NaN exactly where no function gave a reward."""
    rng = np.random.default_rng(seed)
    kinds, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    groups = data.draw(st.integers(1, 3))
    columns = [data.draw(reward_groups(prompts=groups, size=size)).reshape(-1) for _ in range(kinds)]
    rewards, weights = np.stack(columns), rng.uniform(-1, 2, kinds).astype(np.float32)
    got = combined(rewards, weights, aggregate=aggregate, group_size=size)
    want = reference.combine_rewards(
        rewards, weights.astype(np.float64), aggregate=aggregate, group_size=size
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gdpo_by_hand():
    """Two functions of one group of two: z = ±½·√2·…, so a large and a small reward scale weigh the same.

    Function 1 gives (0, 1): std √½, z = ∓0.5/(0.70710678 + 1e-4) = ∓0.70700680. Function 2 gives (300, 100):
    std √20000 = 141.42136, z = ±100/(141.42136 + 1e-4) = ±0.70710628. Sum: ±9.9482e-5 with signs (+, −).
    Then A = (x − 0)/(std x + 1e-4), std x = 9.9482e-5·√2 = 1.40689e-4: A = ±0.41330.
    """
    rewards = np.array([[0.0, 1.0], [300.0, 100.0]], np.float32)
    total = combined(rewards, np.ones(2, np.float32), aggregate="normalize_then_sum", group_size=2)
    np.testing.assert_allclose(total, [9.9482e-5, -9.9482e-5], rtol=2e-3)
    adv = advantages(total.reshape(1, 2), baseline="batch_mean", scale="batch")
    np.testing.assert_allclose(adv, [[0.41330, -0.41330]], rtol=2e-3)


@given(rewards=reward_groups())
def test_varied_rewards_are_those_with_an_advantage(rewards):
    """Exactly the groups with two different rewards have an advantage other than 0."""
    wanted = [len(set(group[~np.isnan(group)].tolist())) > 1 for group in rewards]
    assert np.array(has_varied_rewards(mx.array(rewards))).tolist() == wanted
    assert advantages(rewards, scale="none").any(axis=1).tolist() == wanted


@given(
    length=st.integers(0, 400),
    limit=st.integers(1, 200),
    share=st.floats(0.0, 1.0),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_overlong_penalty_matches_the_reference(length, limit, share, factor):
    """DAPO eq. 13 at any length, limit and buffer."""
    buffer = max(1, round(share * limit))
    got = float(g.overlong_penalty(mx.array([length]), limit, buffer, factor)[0])
    assert got == pytest.approx(reference.overlong_penalty(length, limit, buffer, factor), rel=1e-6, abs=1e-7)


def test_a_registered_baseline_and_scale_are_used_by_their_names(monkeypatch):
    """The best reward of the group as the baseline and half a reward as the unit: A = (R − max)/0.5."""
    best = Baseline(lambda rewards_pg, given_pg: rewards_pg.max(axis=1, keepdims=True))
    monkeypatch.setitem(REGISTERED, "best", best)
    monkeypatch.setitem(REGISTERED_SCALES, "half", lambda rewards_pg, given_pg: mx.array(0.5))
    adv = advantages(np.array([[1.0, 3.0], [2.0, 2.0]], np.float32), baseline="best", scale="half")
    assert adv.tolist() == [[-4.0, 0.0], [0.0, 0.0]]


NO_REWARDS = st.sampled_from([np.inf, -np.inf, 3e38, -1e30, 1.1e15])


def outcomes(rewards, baseline):
    """Everything computed from these rewards, with each scale and aggregate, also as two steps."""
    aggregates = ("sum_then_normalize", "normalize_then_sum")
    how = {"group_size": rewards.shape[1]}
    row = rewards.reshape(1, -1)
    steps = mx.array(rewards[..., None].repeat(2, axis=2))
    states = mx.zeros(steps.shape, mx.int32)
    turns = [g.turn_advantages(steps, baseline=name, states_pgs=states) for name in (baseline, "turn")]
    return [
        *(advantages(rewards, baseline=baseline, scale=scale) for scale in SCALES),
        *(combined(row, np.ones(1), aggregate=aggregate, **how) for aggregate in aggregates),
        *(np.array(each) for each in (*turns, has_varied_rewards(mx.array(rewards)))),
    ]


@given(rewards=reward_groups(), other=NO_REWARDS, baseline=st.sampled_from(BASELINES), seed=seeds)
def test_rewards_that_cannot_be_squared_are_none(rewards, other, baseline, seed):
    """Infinite rewards and those beyond 1e15 count as NaN; at 1e15 every result is finite."""
    missing = np.isnan(rewards) | (np.random.default_rng(seed).random(rewards.shape) < 0.3)
    none, strange, large = (np.where(missing, np.float32(value), rewards) for value in (np.nan, other, 1e15))
    for found, want in zip(outcomes(strange, baseline), outcomes(none, baseline), strict=True):
        np.testing.assert_array_equal(found, want)
    assert all(np.isfinite(found).all() for found in outcomes(large, baseline))


@pytest.mark.parametrize("baseline", [*BASELINES, "turn"])
@pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 3), (0, 4, 0)])
def test_no_prompts_and_no_steps_give_no_advantages(shape, baseline):
    """The result is an empty array of the rewards' shape."""
    empty, states = mx.zeros(shape), mx.zeros(shape, mx.int32)
    assert g.turn_advantages(empty, baseline=baseline, states_pgs=states).shape == shape
    assert discounted_returns(empty, 0.5).shape == shape
    for rewards in (empty, empty[..., 0]) if shape[2] else (empty,):
        for scale in SCALES:
            found = g.group_advantages(rewards, baseline=baseline, scale=scale)
            assert found.shape == rewards.shape
    assert has_varied_rewards(mx.zeros(shape[:1] + shape[2:])).shape == shape[:1]
