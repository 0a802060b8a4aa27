"""The update step: AdamW in float64, clipping, and values that are not finite."""

import math

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from grpo_fn.trees import map_arrays
from tests.grpo_fn.learner.test_numbers_of_a_call import adamw_float64
from tests.support.tiny_policies import same_tree, tiny_policy, tiny_rollout


def hand_state(grads, weight, optimizer, params=None):
    """A state over two small leaves with the given accumulated gradient."""
    params = params or {"a": mx.array([1.0, -2.0, 0.5]), "l": [{"w": mx.array([[3.0, 0.1]])}]}
    state = g.init_state(params, optimizer, key=mx.random.key(0))
    return attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(float(weight)))


def hand_grads(seed, size=1.0):
    rng = np.random.default_rng(seed)
    return {
        "a": mx.array(size * rng.normal(size=3), mx.float32),
        "l": [{"w": mx.array(size * rng.normal(size=(1, 2)), mx.float32)}],
    }


def flat(tree):
    """All numbers of a tree as one float64 vector."""
    return np.concatenate([np.array(a, np.float64).reshape(-1) for _, a in tree_flatten(tree)])


DECAYED = ((0.9, 0.95), 0.1, 0.5)


def make_update(betas=DECAYED[0], decay=DECAYED[1], clip=DECAYED[2], *, compile=False):
    """(optimizer, update step, traces): two warm-up updates, then four with cosine decay."""
    schedule = g.warmup_schedule("cosine", 0.05, 6, 0.34)
    optimizer = g.adamw(schedule, betas=betas, eps=1e-6, weight_decay=decay)
    traces = []

    def apply(*args):
        traces.append(1)
        return optimizer.apply(*args)

    spied = attrs.evolve(optimizer, apply=apply)
    return optimizer, g.make_update_step(spied, max_grad_norm=clip, compile=compile), traces


@pytest.mark.parametrize(
    "settings, compile",
    [(((0.9, 0.999), 0.0, None), False), (((0.0, 0.5), 0.3, 2.0), False), (DECAYED, False), (DECAYED, True)],
)
def test_adamw_is_the_paper_s(settings, compile):
    """Six updates in float64: weight, clipping, moments, bias correction, decay, schedule."""
    betas, decay, clip = settings
    optimizer, update, traces = make_update(*settings, compile=compile)
    state = hand_state(hand_grads(0), 1.0, optimizer)
    p = flat(state.params)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for u in range(6):
        weight = 0.5 + u
        state = attrs.evolve(state, accum_grads=hand_grads(u, 3.0), accum_weight=mx.array(weight))
        state, stats = update(state)
        grad = flat(hand_grads(u, 3.0)) / weight
        norm = np.linalg.norm(grad)
        if clip is not None and norm > clip:
            grad = grad * clip / norm
        rate = 0.05 * (u + 1) / 3 if u < 2 else 0.05 * 0.5 * (1 + math.cos(math.pi * (u - 2) / 4))
        p, m, v = adamw_float64(p, grad, m, v, u + 1, g.Rates(rate, betas, 1e-6, decay))
        np.testing.assert_allclose(flat(state.params), p, rtol=2e-5, atol=2e-6)
        assert stats.grad_norm.item() == pytest.approx(norm, rel=1e-5)
        assert stats.learning_rate.item() == pytest.approx(rate, rel=1e-5)
        assert not stats.skipped.item() and state.update_step.item() == u + 1
    assert len(traces) == (1 if compile else 6), "the schedule runs on the device: no update traces again"


@pytest.mark.parametrize("bad, compile", [(math.inf, False), (math.nan, True), (-math.inf, True)])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, compile):
    """Parameters and moments keep every bit, the statistics say so, and the next update works."""
    optimizer, update, _ = make_update(compile=compile)
    state, _ = update(hand_state(hand_grads(0), 2.0, optimizer))
    broken = hand_grads(1)
    broken["a"] = broken["a"] * mx.array([1.0, bad, 1.0])
    skipped, stats = update(attrs.evolve(state, accum_grads=broken, accum_weight=mx.array(2.0)))
    assert stats.skipped.item() and not math.isfinite(float(stats.grad_norm))
    assert same_tree(skipped.params, state.params) and same_tree(skipped.opt_state, state.opt_state)
    assert not flat(skipped.accum_grads).any() and skipped.accum_weight.item() == 0.0
    after, stats = update(attrs.evolve(skipped, accum_grads=hand_grads(2), accum_weight=mx.array(2.0)))
    assert not stats.skipped.item() and np.isfinite(flat(after.params)).all()
    assert after.opt_state["step"].item() == 2, "what the moments have seen"
    assert not same_tree(after.params, state.params)


BIG = {"a": mx.array([1.0, -2e38, 0.5]), "l": [{"w": mx.array([[3.0, 0.1]])}]}


@pytest.mark.parametrize("compile", [False, True])
def test_a_rate_that_is_not_finite_changes_nothing(compile):
    """1e39 is infinite in float32; a finite rate continues from the same state."""
    state = hand_state(hand_grads(0), 2.0, g.adamw(1e39))
    after, stats = g.make_update_step(g.adamw(1e39), compile=compile)(state)
    assert stats.skipped.item() and math.isfinite(float(stats.grad_norm))
    assert same_tree(after.params, state.params) and same_tree(after.opt_state, state.opt_state)
    assert after.update_step.item() == 1 and not flat(after.accum_grads).any()
    sane = g.make_update_step(g.adamw(0.1), compile=compile)
    again, stats = sane(attrs.evolve(after, accum_grads=hand_grads(1), accum_weight=mx.array(2.0)))
    assert not stats.skipped.item() and not same_tree(again.params, state.params)


@pytest.mark.parametrize("compile", [False, True])
def test_values_that_would_not_be_finite_are_never_taken(compile):
    """A leaf that would overflow stays, and the statistics say so."""
    grads = {"a": mx.array([0.1, 0.2, -0.1]), "l": [{"w": mx.array([[0.3, 0.1]])}]}
    state = hand_state(grads, 2.0, g.adamw(2e38), BIG)
    after, stats = g.make_update_step(g.adamw(2e38), compile=compile)(state)
    assert stats.skipped.item() and math.isfinite(float(stats.grad_norm))
    assert np.isfinite(flat(after.params)).all() and np.isfinite(flat(after.opt_state)).all()
    assert same_tree(after.params["a"], BIG["a"])


@pytest.mark.parametrize("compile", [False, True])
def test_a_loss_that_is_not_finite_skips_its_update(compile):
    """An infinite loss whose gradient is 0 is skipped, whatever micro-batches surround it."""
    policy, spec = tiny_policy(), g.preset("grpo", epsilon_high=0.2)
    rollout = tiny_rollout()
    good = g.make_batch(rollout, mx.array([[1.0, -1.0, 0.5], [0.2, -0.7, 0.4]]))
    # Ratios of e^3 lie outside the clip where A > 0: the term is a constant, and constants have no gradient.
    old = attrs.evolve(good, old_logp_bt=g.make_logprob_step(policy)(policy.params, good) - 3.0)
    bad = attrs.evolve(old, advantages_b=mx.full(old.advantages_b.shape, 2.5e38))
    optimizer = g.adamw(0.1)
    grad_step = g.make_grad_step(policy, spec, compile=compile)
    update_step = g.make_update_step(optimizer, compile=compile)
    start = g.init_state(policy.params, optimizer, key=mx.random.key(0))
    alone, stats = grad_step(start, bad)
    assert not math.isfinite(float(stats.loss)) and np.isfinite(flat(alone.accum_grads)).all()
    for batches in ([bad], [good, bad], [bad, good]):
        state, _ = grad_step(start, batches)
        state, update = update_step(state)
        assert update.skipped.item()
        assert same_tree(state.params, start.params) and same_tree(state.opt_state, start.opt_state)
    state, update = update_step(grad_step(state, good)[0])
    assert not update.skipped.item() and not same_tree(state.params, start.params)


def test_nothing_accumulated_is_no_division_by_zero():
    """Weight 0 and gradient 0 leave the parameters finite and unchanged."""
    optimizer = g.adamw(0.1)
    state = hand_state(map_arrays(mx.zeros_like, hand_grads(0)), 0.0, optimizer)
    after, stats = g.make_update_step(optimizer, compile=False)(state)
    assert stats.grad_norm.item() == 0.0 and not stats.skipped.item()
    assert same_tree(after.params, state.params)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    "total, ratio", [(10, 0.0), (10, 0.3), (7, 0.1), (1, 0.0), (1, 1.0), (5, 1.0), (200, 0.05)]
)
def test_warm_up_and_decay(kind, total, ratio):
    """Each update's rate follows the formula, also past the last update."""
    schedule, warmup = g.warmup_schedule(kind, 3e-4, total, ratio), round(total * ratio)
    for u in range(total + 3):
        share = min((u - warmup) / max(total - warmup, 1), 1.0)
        decay = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1}[kind]
        want = 3e-4 * ((u + 1) / (warmup + 1) if u < warmup else decay)
        assert schedule(mx.array(u, mx.int32)).item() == pytest.approx(want, rel=2e-6, abs=1e-10)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: g.warmup_schedule("cosin", 1e-3, 10, 0.1), "did you mean 'cosine'"),
        (lambda: g.warmup_schedule("cosine", 1e-3, 0, 0.1), "total_updates = 0"),
        (lambda: g.warmup_schedule("cosine", 1e-3, 10, 1.5), "warmup_ratio = 1.5"),
        (lambda: g.warmup_schedule("cosine", -1e-3, 10, 0.1), "learning_rate = -0.001"),
        (lambda: g.adamw(-1.0), "learning_rate = -1.0"),
        (lambda: g.adamw(1e-3, betas=(0.9, 1.0)), "betas"),
        (lambda: g.adamw(1e-3, betas=(-0.1, 0.9)), "betas"),
        (lambda: g.adamw(1e-3, weight_decay=-0.1), "weight_decay = -0.1"),
        (lambda: g.adamw(1e-3, eps=0.0), "eps = 0.0"),
        (lambda: g.make_update_step(g.adamw(0.1), max_grad_norm=0.0), "norm = 0.0.*None for no clipping"),
        (lambda: g.make_update_step(g.adamw(0.1), max_grad_norm=-1.0), "norm = -1.0.*None for no clipping"),
        (lambda: g.adamw(1e-3, moment_dtype=mx.float16), "moment_dtype = mlx.core.float16: expected"),
    ],
)
def test_values_out_of_range_are_refused(make, word):
    """The message names the value."""
    with pytest.raises(ValueError, match=word):
        make()


def test_applying_changes_nothing_in_place():
    """The moments passed in are unchanged, so a discarded update leaves no trace."""
    optimizer, grads = g.adamw(0.1), hand_grads(0)
    state = hand_state(grads, 1.0, optimizer)
    before, params = (map_arrays(lambda a: a + 0, tree) for tree in (state.opt_state, state.params))
    numbers = optimizer.numbers(state.opt_state, mx.array(0, mx.int32))
    made, after = optimizer.apply(grads, state.opt_state, state.params, numbers, lambda new, old: new)
    mx.eval(made, after)
    assert same_tree(state.opt_state, before) and same_tree(state.params, params)
    np.testing.assert_allclose(after["a"]["m"], 0.1 * np.array(grads["a"]), rtol=1e-6)
    assert before["step"].item() == 0 and after["step"].item() == 1, "what the moments have seen"
