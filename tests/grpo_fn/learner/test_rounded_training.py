"""Training with bfloat16 masters: the real update step moves them by float32's steps, on average."""

import math

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.trees import map_arrays
from tests.support.tiny_policies import (
    memory_in_use,
    same_tree,
)

RATE = 1e-6
DTYPES = [(mx.bfloat16, mx.float32), (mx.bfloat16, mx.bfloat16)]


def to_nearest(optimizer):
    """The optimizer with rounding to nearest: new values come to `keep` in the old ones' dtype."""

    def apply(grads, opt_state, params, numbers, keep, factor):
        def rounded(new, old):
            return keep(new.astype(old.dtype), old)

        return optimizer.apply(grads, opt_state, params, numbers, rounded, factor)

    return attrs.evolve(optimizer, apply=apply)


def state_of(params, optimizer, seed=0):
    """A state before its first update."""
    return g.init_state(params, optimizer, key=mx.random.key(seed))


def trained(params, grads, updates, optimizer, *, clip=None, seed=0, compile=True):
    """The state after that many updates with the same gradient."""
    state = state_of(params, optimizer, seed)
    update = g.make_update_step(optimizer, max_grad_norm=clip, compile=compile)
    for _ in range(updates):
        state, _ = update(attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0)))
        g.materialize(state)
    return state


def mean_step(state, start):
    """How far the leaf "w" has gone on average, float64."""
    return np.array(state.params["w"].astype(mx.float32), np.float64).mean() - start


@pytest.mark.parametrize("start", [1.0, -1.0])
def test_at_1e_6_plain_bfloat16_stands_still_and_rounded_follows_float32(start):
    """Sixty updates of weights of size 1: not one bit, against float32's distance to a few per cent."""
    size, updates = 1 << 17, 60
    grads = {"w": mx.full((size,), -0.3)}
    float32 = trained({"w": mx.full((size,), start)}, grads, updates, g.adamw(RATE))
    half = {"w": mx.full((size,), start, mx.bfloat16)}
    plain = trained(half, grads, updates, to_nearest(g.adamw(RATE)))
    assert same_tree(plain.params, half)
    wanted = mean_step(float32, start)
    assert wanted == pytest.approx(updates * RATE, rel=0.05)
    gap = 2.0**-7 if start > 0 else 2.0**-8  # towards which it goes
    error = math.sqrt(wanted * gap / size)
    assert error < 0.05 * wanted
    for masters, moments in DTYPES:
        params = {"w": mx.full((size,), start, masters)}
        rounded = trained(params, grads, updates, g.adamw(RATE, moment_dtype=moments))
        assert rounded.params["w"].dtype == masters
        assert abs(mean_step(rounded, start) - wanted) < 5 * error


def test_bfloat16_moments_do_not_stall():
    """The second moment creeps by a thousandth an update, which rounding to nearest loses half-way."""
    size, updates = 2048, 400
    grads, params = {"w": mx.ones((size,))}, {"w": mx.ones((size,))}
    exact = 1 - 0.999**updates
    optimizer = g.adamw(RATE, moment_dtype=mx.bfloat16)
    plain = trained(params, grads, updates, to_nearest(optimizer)).opt_state["w"]["v"]
    rounded = trained(params, grads, updates, optimizer).opt_state["w"]["v"]
    assert plain.dtype == rounded.dtype == mx.bfloat16
    assert plain.astype(mx.float32).mean().item() < 0.8 * exact
    values = np.array(rounded.astype(mx.float32), np.float64)
    assert abs(values.mean() - exact) < 5 * values.std() / math.sqrt(size) < 0.01 * exact
    assert values.std() < 0.1 * exact


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_update_leaves_every_bit(bad, compile):
    """Masters and moments in bfloat16, after an update and before one that cannot be taken."""
    optimizer = g.adamw(0.01, moment_dtype=mx.bfloat16, weight_decay=0.1)
    params = {"w": mx.full((50,), 1.0, mx.bfloat16), "l": [{"w": mx.full((3, 2), -0.3, mx.bfloat16)}]}
    grads = map_arrays(lambda a: mx.random.normal(a.shape, key=mx.random.key(1)), params)
    state = trained(params, grads, 2, optimizer, compile=compile)
    broken = {**grads, "w": grads["w"] * mx.array([bad] + [1.0] * 49)}
    update = g.make_update_step(optimizer, max_grad_norm=1.0, compile=compile)
    after, stats = update(attrs.evolve(state, accum_grads=broken, accum_weight=mx.array(1.0)))
    assert stats.skipped.item() and after.update_step.item() == 3
    assert same_tree(after.params, state.params) and same_tree(after.opt_state, state.opt_state)


def test_the_key_the_update_and_the_leaf_decide_the_draws():
    """The same state twice gives the same bits; another key, another update or another leaf gives others."""
    size = 2000
    params = {name: mx.full((size,), 1.0, mx.bfloat16) for name in "ab"}
    grads = {name: mx.ones((size,)) for name in "ab"}
    optimizer = g.adamw(2.0**-9, betas=(0.0, 0.0))  # half-way to the next number below, each time
    one, again, other = (trained(params, grads, 1, optimizer, seed=seed) for seed in (0, 0, 1))
    assert same_tree(one.params, again.params)
    update = g.make_update_step(optimizer)
    begun = attrs.evolve(state_of(params, optimizer), accum_grads=grads, accum_weight=mx.array(1.0))
    later, _ = update(attrs.evolve(begun, update_step=mx.array(1, mx.int32)))
    draws = [one.params["a"], one.params["b"], other.params["a"], later.params["a"]]
    moved = [np.array(leaf < 1) for leaf in draws]
    for i, first in enumerate(moved):
        assert 0.4 * size < first.sum() < 0.6 * size
        for second in moved[:i]:
            assert 0.4 * size < (first == second).sum() < 0.6 * size


def test_an_update_holds_a_few_leaves_beyond_the_state():
    """The old values make way leaf by leaf: no second tree of weights, moments or gradients."""
    size, leaves = 4096, 400
    optimizer = g.adamw(RATE)
    update = g.make_update_step(optimizer, max_grad_norm=1.0)
    for masters in (mx.float32, mx.bfloat16):
        state = state_of({"l": [mx.ones((size,), masters) for _ in range(leaves)]}, optimizer)
        state = attrs.evolve(state, old_params=None)
        for _ in range(2):
            grads = map_arrays(lambda a: mx.ones(a.shape) + 0, state.params)
            state = attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0))
            del grads
            g.materialize(state)
            before = memory_in_use()
            mx.reset_peak_memory()
            state, _ = update(state)
            g.materialize(state)
        assert before > 14 * size * leaves
        assert mx.get_peak_memory() - before < 1 * size * leaves


def test_a_reference_that_follows_slowly_does_not_stand_still():
    """Mixing a thousandth of the policy into a bfloat16 reference moves it by that much on average."""
    size = 1 << 16
    state = state_of({"w": mx.full((size,), 1.5, mx.bfloat16)}, g.adamw(RATE))
    state = attrs.evolve(state, ref_params={"w": mx.ones((size,), mx.bfloat16)})
    found = g.sync_ref(state, 0.001).ref_params
    assert found["w"].dtype == mx.bfloat16
    moved = np.array(found["w"].astype(mx.float32), np.float64).mean() - 1
    assert moved == pytest.approx(0.0005, rel=0.1)
