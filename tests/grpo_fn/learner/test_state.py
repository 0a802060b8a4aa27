"""TrainState and the syncs between its policies."""

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from grpo_fn.learner.state import zeros_like
from grpo_fn.trees import arrays_of
from tests.support.tiny_policies import memory_in_use, same_tree


def make_params(seed=0):
    """A nested tree of two leaves, one of them in a list."""
    a, w = (mx.random.normal(shape, key=mx.random.key(seed + n)) for n, shape in enumerate(((3, 4), (5,))))
    return {"a": a, "l": [{"w": w}]}


def make_state(**options):
    """A state over `make_params()`."""
    return g.init_state(make_params(), g.adamw(1e-3), key=mx.random.key(3), **options)


def same_arrays(one, other):
    """Whether two trees hold the very same array objects."""
    return [id(a) for a in arrays_of(one)] == [id(b) for b in arrays_of(other)]


def test_the_first_state_has_counted_nothing():
    """Counters, accumulated gradients and moments are zero; the key is the one given."""
    state = make_state()
    assert state.step.item() == state.update_step.item() == 0 and state.accum_weight.item() == 0.0
    assert state.step.dtype == state.update_step.dtype == mx.int32 and state.accum_weight.dtype == mx.float32
    for tree in (state.accum_grads, state.opt_state):
        assert all(not a.any().item() for a in arrays_of(tree))
    assert [n for n, _ in tree_flatten(state.accum_grads)] == [n for n, _ in tree_flatten(state.params)]
    assert state.key.tolist() == mx.random.key(3).tolist()


def test_zeros_like_takes_no_memory():
    """Zeros of a model's size occupy one number, also after evaluation."""
    shapes = {"w": mx.zeros((512, 512)), "h": mx.zeros((64,), mx.bfloat16)}
    mx.eval(shapes)
    before = memory_in_use()
    zeros = zeros_like(shapes)
    mx.eval(zeros)
    assert memory_in_use() - before < 256
    assert zeros["w"].shape == (512, 512) and zeros["h"].dtype == mx.float32 and not zeros["w"].any().item()


def test_sync_old_takes_the_policy_s_arrays_without_a_copy():
    """π_old shares the arrays of π_θ; nothing else in the state changes."""
    state = attrs.evolve(make_state(), params=make_params(1))
    synced = g.sync_old(state)
    assert same_arrays(synced.old_params, state.params)
    assert not same_tree(state.old_params, state.params), "the state that was synced has itself changed"
    for field in attrs.fields(g.TrainState):
        if field.name != "old_params":
            assert getattr(synced, field.name) is getattr(state, field.name)


@pytest.mark.parametrize("mixup", [0.1, 0.6, 0.999])
def test_sync_ref_mixes(mixup):
    """ref ← α·θ + (1−α)·ref in float64; two syncs leave (1−α)² of the first reference."""
    state = attrs.evolve(make_state(ref_params=make_params(0)), params=make_params(1))
    once = g.sync_ref(state, mixup)
    twice = g.sync_ref(once, mixup)
    for start, theta, first, second in zip(
        *map(arrays_of, (state.ref_params, state.params, once.ref_params, twice.ref_params)), strict=True
    ):
        start, theta = np.array(start, np.float64), np.array(theta, np.float64)
        np.testing.assert_allclose(np.array(first), mixup * theta + (1 - mixup) * start, rtol=1e-6, atol=1e-7)
        left = (1 - mixup) ** 2
        np.testing.assert_allclose(np.array(second), (1 - left) * theta + left * start, rtol=1e-6, atol=1e-7)
    assert same_arrays(once.params, state.params)


@pytest.mark.parametrize("mixup", [0.0, -0.1, 1.1, float("nan")])
def test_sync_ref_refuses_a_share_outside_its_range(mixup):
    """α must be in (0, 1], and the state must have a reference."""
    with pytest.raises(ValueError, match="mixup"):
        g.sync_ref(make_state(ref_params=make_params()), mixup)
    with pytest.raises(ValueError, match=r"no ref_params.*beta"):
        g.sync_ref(make_state())
