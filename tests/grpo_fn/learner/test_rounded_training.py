"""Training with bfloat16 masters: the real update step moves them by float32's steps, on average."""

import math

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.trees import arrays_of, map_arrays, nbytes
from tests.support.tiny_policies import (
    VOCAB,
    lora_policy,
    memory_in_use,
    same_tree,
    tiny_advantages,
    tiny_policy,
    tiny_rollout,
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


def test_decay_reaches_weights_that_it_could_not_move():
    """Decoupled decay of 1e-6 an update, with no gradient at all."""
    size, updates = 1 << 17, 30
    grads, half = {"w": mx.zeros((size,))}, {"w": mx.full((size,), 1.5, mx.bfloat16)}
    optimizer = g.adamw(RATE, weight_decay=1.0)
    assert same_tree(trained(half, grads, updates, to_nearest(optimizer)).params, half)
    found = mean_step(trained(half, grads, updates, optimizer), 1.5)
    wanted = 1.5 * ((1 - RATE) ** updates - 1)
    assert abs(found - wanted) < 5 * math.sqrt(-wanted * 2.0**-7 / size) < -0.5 * wanted


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


def tiny_batch():
    """A batch of random tokens and advantages."""
    rollout = tiny_rollout((5, 4, 6), 4, 9)
    return g.make_batch(rollout, tiny_advantages(rollout))


def objective(logp_bt, batch):
    """Σ of advantage × log-prob, float64: what a policy gradient raises."""
    terms_bt = np.array(logp_bt, np.float64) * np.array(batch.advantages_b, np.float64)[:, None]
    return float((terms_bt * np.array(batch.mask_bt, np.float64)).sum())


def test_a_model_trains_at_1e_6_as_it_does_in_float32():
    """Real steps of a small model: rounded, the objective rises as in float32; plain, it does not."""
    policy, batch = tiny_policy(compute_dtype=mx.float32), tiny_batch()
    half = map_arrays(lambda a: a.astype(mx.bfloat16), policy.params)
    grad_step = g.make_grad_step(policy, g.preset("grpo", surrogate="none", beta=0.0))
    logprob_step = g.make_logprob_step(policy)
    start = objective(logprob_step(half, batch), batch)

    def gained(dtype, optimizer, seeds=1):
        update = g.make_update_step(optimizer, max_grad_norm=1.0)
        gains = []
        for seed in range(seeds):
            state = state_of(map_arrays(lambda a: a.astype(dtype), half), optimizer, seed)
            for _ in range(15):
                state, _ = grad_step(state, batch)
                assert {a.dtype for a in arrays_of(state.accum_grads)} == {mx.float32}
                state, _ = update(state)
                g.materialize(state)
            gains.append(objective(logprob_step(state.params, batch), batch) - start)
        return np.mean(gains)

    wanted = gained(mx.float32, g.adamw(RATE))
    assert wanted > 0
    for moments in (mx.float32, mx.bfloat16):
        found = gained(mx.bfloat16, g.adamw(RATE, moment_dtype=moments), seeds=3)
        assert found == pytest.approx(wanted, rel=0.15)
    assert abs(gained(mx.bfloat16, to_nearest(g.adamw(RATE)))) < 0.1 * wanted


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


def test_clipping_is_float32_s():
    """The moments that a clipped gradient leaves are those of float32 masters."""
    grads = {"w": mx.random.normal((100,), key=mx.random.key(0)) * 50}
    states = [
        trained({"w": mx.ones((100,), dtype)}, grads, 3, g.adamw(RATE), clip=0.7)
        for dtype in (mx.float32, mx.bfloat16)
    ]
    one, other = (state.opt_state["w"] for state in states)
    assert mx.allclose(one["m"], other["m"], rtol=1e-6) and mx.allclose(one["v"], other["v"], rtol=1e-6)
    assert mx.linalg.norm(one["m"]).item() == pytest.approx(0.7 * (1 - 0.9**3), rel=1e-4)


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


def test_one_trace_serves_all_updates():
    """Key and update's number are arguments: the second update runs the first one's program."""
    optimizer = g.adamw(RATE, moment_dtype=mx.bfloat16)
    traces = []

    def apply(*args):
        traces.append(1)
        return optimizer.apply(*args)

    params = {"w": mx.ones((8,), mx.bfloat16), "l": [{"w": mx.ones((3,), mx.bfloat16)}]}
    trained(params, map_arrays(lambda a: mx.ones(a.shape), params), 4, attrs.evolve(optimizer, apply=apply))
    assert len(traces) == 1


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


def test_the_sampler_reads_bfloat16_masters_in_place():
    """After an update a sync copies nothing, nor does the forward in their own dtype."""
    policy = tiny_policy(compute_dtype=mx.bfloat16, hidden_size=128, intermediate_size=256)
    params = map_arrays(lambda a: a.astype(mx.bfloat16), policy.params)
    grads = map_arrays(lambda a: mx.ones(a.shape), params)
    state = trained(params, grads, 1, g.adamw(1e-2))
    del params, grads
    state = attrs.evolve(state, old_params=None)
    before = memory_in_use()
    synced = g.sync_old(state)
    seen = policy.cast(synced.old_params)
    g.materialize(synced.old_params, seen)
    assert all(a is b for a, b in zip(arrays_of(synced.old_params), arrays_of(state.params), strict=True))
    assert memory_in_use() - before < 0.01 * nbytes(state.params)
    assert mx.isfinite(policy.logits(synced.old_params, mx.array([[1, 2, VOCAB - 1]]))).all()


def test_adapters_may_be_bfloat16_too():
    """LoRA: what trains is rounded, what is frozen stays, and the objective rises."""
    policy, batch = lora_policy(), tiny_batch()
    params = map_arrays(lambda a: a.astype(mx.bfloat16), policy.params)
    optimizer = g.adamw(1e-3, moment_dtype=mx.bfloat16)
    state, logprob_step = state_of(params, optimizer), g.make_logprob_step(policy, compile=False)
    grad_step = g.make_grad_step(policy, g.preset("grpo", surrogate="none", beta=0.0), compile=False)
    update = g.make_update_step(optimizer, compile=False)
    for _ in range(5):
        state, _ = update(grad_step(state, batch)[0])
    assert {a.dtype for a in arrays_of(state.params)} == {mx.bfloat16}
    before, after = (objective(logprob_step(p, batch), batch) for p in (params, state.params))
    assert after > before


def test_a_reference_that_follows_slowly_does_not_stand_still():
    """Mixing a thousandth of the policy into a bfloat16 reference moves it by that much on average."""
    size = 1 << 16
    state = state_of({"w": mx.full((size,), 1.5, mx.bfloat16)}, g.adamw(RATE))
    state = attrs.evolve(state, ref_params={"w": mx.ones((size,), mx.bfloat16)})
    found = g.sync_ref(state, 0.001).ref_params
    assert found["w"].dtype == mx.bfloat16
    moved = np.array(found["w"].astype(mx.float32), np.float64).mean() - 1
    assert moved == pytest.approx(0.0005, rel=0.1)
