"""Advantages of turns and of tokens: against plain loops, and against those of whole completions."""

import math

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grpo_fn as g
from tests.support.properties import reference_advantages as reference
from tests.support.properties.harness import run_library, same_outcome
from tests.support.properties.strategies import loss_cases, reward_groups

seeds = st.integers(0, 2**32 - 1)
baselines = st.sampled_from(["group_mean", "leave_one_out", "batch_mean"])
scales = st.sampled_from(["group", "batch", "none"])


def of_turns(rewards, **options):
    """turn_advantages as NumPy float64."""
    if "states_pgs" in options:
        options["states_pgs"] = mx.array(options["states_pgs"])
    return np.array(g.turn_advantages(mx.array(rewards), **options)).astype(np.float64)


def cases(seed):
    """Rewards [P,G,S], NaN among them and beyond a completion's turns; the states in which turns start."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers([1, 2, 1], [4, 5, 5]))
    rewards = rng.integers(-2, 3, shape).astype(np.float32)
    rewards[rng.random(shape) < 0.3] = np.nan
    states = rng.integers(0, 3, shape).astype(np.int32)
    beyond = np.arange(shape[2]) >= rng.integers(1, shape[2] + 1, shape[:2])[..., None]
    rewards[beyond], states[beyond] = np.nan, -1
    return rewards, states


def returns_of(rewards_s, discount):
    """R_s = Σ_{k ≥ s} γ^(k−s)·r_k, term by term."""
    return [
        sum(discount ** (k - s) * r for k, r in enumerate(rewards_s) if k >= s and not math.isnan(r))
        for s in range(len(rewards_s))
    ]


@given(seed=seeds, baseline=baselines, scale=scales, discount=st.sampled_from([1.0, 0.9, 0.0]))
def test_process_supervision_is_the_plain_loop(seed, baseline, scale, discount):
    """All steps of a group are normalized together, then summed from each step on."""
    rewards, _ = cases(seed)
    if baseline == "batch_mean" and scale == "group":
        scale = "batch"
    groups, size, steps = rewards.shape
    flat = rewards.reshape(groups, size * steps)
    z = reference.group_advantages(flat, baseline=baseline, scale=scale).reshape(rewards.shape)
    want = [[returns_of(row, discount) for row in group] for group in z]
    got = of_turns(rewards, baseline=baseline, scale=scale, discount=discount)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@given(seed=seeds, scale=st.sampled_from(["group", "none"]), discount=st.sampled_from([1.0, 0.95, 0.5]))
def test_gigpo_is_the_plain_loop(seed, scale, discount):
    """A = A^E + A^S: the episode within its group, and the step's return within its state."""
    rewards, states = cases(seed)
    groups, size = rewards.shape[:2]
    total = np.where(np.isnan(rewards).all(axis=2), np.nan, np.nansum(rewards, axis=2))
    episode = reference.group_advantages(total, scale=scale)
    want = np.zeros(rewards.shape)
    for p in range(groups):
        returns = {}
        for i in range(size):
            for s, value in enumerate(returns_of(rewards[p, i], discount)):
                if states[p, i, s] >= 0:
                    returns[i, s] = math.nan if math.isnan(total[p, i]) else value
        for (i, s), _ in returns.items():
            mates = [key for key in returns if states[(p, *key)] == states[p, i, s]]
            values = np.array([[returns[key] for key in mates]], np.float32)
            of_state = reference.group_advantages(values, scale=scale)[0, mates.index((i, s))]
            want[p, i, s] = episode[p, i] + of_state
    got = of_turns(rewards, baseline="turn", scale=scale, discount=discount, states_pgs=states)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@given(rewards=reward_groups(), baseline=baselines, scale=scales, seed=seeds)
def test_one_reward_at_the_end_gives_the_bits_of_whole_completions(rewards, baseline, scale, seed):
    """Each turn of a completion has the completion's advantage, to the bit."""
    steps = np.random.default_rng(seed).integers(1, 5, rewards.shape)
    by_turn = np.full((*rewards.shape, 4), np.nan, np.float32)
    np.put_along_axis(by_turn, steps[..., None] - 1, rewards[..., None], axis=2)
    want = np.array(g.group_advantages(mx.array(rewards), baseline=baseline, scale=scale))
    got = np.array(g.turn_advantages(mx.array(by_turn), baseline=baseline, scale=scale))
    for s in range(4):
        np.testing.assert_array_equal(got[..., s], np.where(s < steps, want, 0.0))


def test_states_that_nobody_shares_add_nothing():
    """A step alone in its state has A^S = 0 exactly, and so have equal returns."""
    rewards = np.array([[[0.0, 1.0], [0.3, 0.1]]], np.float32)
    alone = of_turns(rewards, baseline="turn", states_pgs=np.array([[[0, 1], [2, 3]]], np.int32))
    assert (alone[..., 0] == alone[..., 1]).all()
    np.testing.assert_allclose(alone[..., 0], g.group_advantages(mx.array([[1.0, 0.4]])), rtol=1e-6)
    same = of_turns(np.full((1, 3, 1), 0.1, np.float32), baseline="turn", states_pgs=np.zeros((1, 3, 1), int))
    assert (same == 0.0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(baseline="turn"), "requires states_pgs"),
        (dict(baseline="turn", scale="batch", states_pgs=mx.zeros((1, 2, 3))), "'group' or 'none'"),
        (dict(baseline="turn", states_pgs=mx.zeros((1, 2, 2))), r"states_pgs has shape \(1, 2, 2\)"),
        (dict(discount=1.5), "discount = 1.5: expected 0 <= discount <= 1"),
        (dict(baseline="turns"), "did you mean 'turn'"),
    ],
)
def test_wrong_options_are_named(options, message):
    """The message says what was expected."""
    with pytest.raises(ValueError, match=message):
        g.turn_advantages(mx.zeros((1, 2, 3)), **options)


@given(case=loss_cases())
def test_constant_token_advantages_are_those_of_the_completion(case):
    """Exactly at the token level; at the sequence level, token weights may move the gradient."""
    by_token = np.repeat(case.adv[:, None], case.mask.shape[1], axis=1)
    one, other = run_library(case), run_library(attrs.evolve(case, adv=by_token))
    assert one.stats == pytest.approx(other.stats, rel=1e-6, abs=1e-6)
    uneven = case.keep is not None or case.fields["correction"].startswith("token")
    if case.fields["level"] == "token":
        assert one.loss == other.loss and one.stats == other.stats
        np.testing.assert_array_equal(one.grad, other.grad)
    elif not uneven:
        same_outcome(one, other, case, relative=1e-5)


@given(case=loss_cases(fields=dict(level="token")), seed=seeds)
def test_a_token_s_advantage_moves_that_token_alone(case, seed):
    """A token's gradient depends on its own advantage only; masked advantages are not read."""
    rng = np.random.default_rng(seed)
    adv = rng.normal(size=case.mask.shape).astype(np.float32)
    other = np.where(case.mask > 0, adv, np.nan).astype(np.float32)
    row, token = rng.integers(0, adv.shape[0]), rng.integers(0, adv.shape[1])
    changed = other.copy()
    changed[row, token] += 1.0
    before, same, after = (run_library(attrs.evolve(case, adv=a)) for a in (adv, other, changed))
    np.testing.assert_array_equal(before.grad, same.grad)
    assert before.loss == same.loss
    others = np.ones_like(adv, bool)
    others[row, token] = False
    np.testing.assert_array_equal(before.grad[others], after.grad[others])
