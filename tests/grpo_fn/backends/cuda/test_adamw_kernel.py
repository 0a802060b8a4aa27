"""AdamW's kernel against the composed update; on any machine, what it is asked for and what comes of it."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.backends import disabled, find, substituted
from grpo_fn.backends.cuda import adamw_kernel
from grpo_fn.backends.cuda import kernels as cuda_kernels
from grpo_fn.backends.cuda.adamw_kernel import takes_leaf
from grpo_fn.trees import arrays_of
from tests.support.tiny_policies import same_tree

needs_cuda = pytest.mark.skipif(not takes_leaf(mx.zeros((1,))), reason="needs CUDA")
SHAPES = {"a": (3, 257), "b": {"c": (1,), "d": (40, 8, 5)}}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-6, 0.1


def tree(seed, shapes=None):
    """Normal numbers of these shapes."""
    shapes = shapes or SHAPES
    return {
        name: tree(seed + 7 * n, shape)
        if isinstance(shape, dict)
        else mx.random.normal(shape, key=mx.random.key(seed + n))
        for n, (name, shape) in enumerate(shapes.items())
    }


def after_updates(grads, *, updates=3):
    """The states after each of some updates with these gradients, and whether each was skipped."""
    optimizer = g.adamw(0.01, betas=BETAS, eps=EPS, weight_decay=DECAY)
    update = g.make_update_step(optimizer, max_grad_norm=1.0, compile=False)
    state = g.init_state(tree(100), optimizer, key=mx.random.key(0))
    found = []
    for _ in range(updates):
        state = attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(2.0))
        state, stats = update(state)
        found.append((state, stats.skipped.item()))
    return found


def stand_in(param, grad, m, v, numbers_5, betas, eps):
    """The kernel's contract in MLX's operations."""
    factor, decay, c1, c2, taken = numbers_5
    grad = grad * factor
    new_m = betas[0] * m + (1 - betas[0]) * grad
    new_v = betas[1] * v + (1 - betas[1]) * mx.square(grad)
    new = (param * decay - c1 * new_m / (mx.sqrt(new_v) * c2 + eps), new_m, new_v)
    fault = mx.stack([mx.logical_not(mx.isfinite(value).all()) for value in new]).astype(mx.int32)
    pairs = zip(new, (param, m, v), fault, strict=True)
    return (*(mx.where((taken > 0) & (bad == 0), value, old) for value, old, bad in pairs), fault)


@pytest.fixture(name="by_leaf", params=["stand-in", pytest.param("kernel", marks=needs_cuda)])
def _by_leaf(request):
    """The whole-leaf path: with the kernel, or with its contract where there is no CUDA."""
    if request.param == "stand-in":
        with substituted(adamw=stand_in):
            yield
    else:
        assert find("adamw", mx.zeros((1,))) is adamw_kernel.adamw_leaf
        yield


def test_updates_are_those_of_the_composed_form(by_leaf):
    """Clipping, decay, bias correction and the division by the weight, over three updates."""
    found = after_updates(tree(1))
    with disabled("adamw"):
        wanted = after_updates(tree(1))
    for (one, skipped), (other, also) in zip(found, wanted, strict=True):
        assert not skipped and not also
        pairs = zip(
            arrays_of((one.params, one.opt_state)), arrays_of((other.params, other.opt_state)), strict=True
        )
        for a, b in pairs:
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(np.array(a), np.array(b), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_changes_nothing(by_leaf, number):
    """One number of the gradient makes the norm NaN or infinite: all leaves stay, and the stats say so."""
    grads = tree(1)
    grads["a"][1, 200] = number
    ((state, skipped),) = after_updates(grads, updates=1)
    assert skipped and same_tree(state.params, tree(100))
    assert all(not np.array(a).any() for a in arrays_of(state.opt_state))


def test_a_leaf_whose_new_values_are_not_finite_stays(by_leaf):
    """A parameter's step overflows: its leaf stays, the rest is taken, and the update counts as skipped."""
    optimizer = g.adamw(0.01, betas=BETAS)
    update = g.make_update_step(optimizer, compile=False)
    state = g.init_state(tree(100), optimizer, key=mx.random.key(0))
    old = state.opt_state["a"]
    large = mx.zeros(SHAPES["a"])
    large[1, 200] = 3e38
    state = attrs.evolve(state, opt_state={**state.opt_state, "a": {**old, "m": large}})
    grads = {**tree(1), "a": 1e-3 * tree(1)["a"]}
    after, stats = update(attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0)))
    with disabled("adamw"):
        want, want_stats = update(attrs.evolve(state, accum_grads=grads, accum_weight=mx.array(1.0)))
    assert stats.skipped.item() and want_stats.skipped.item()
    assert same_tree(after.params["a"], state.params["a"])
    pairs = zip(
        arrays_of((after.params, after.opt_state)), arrays_of((want.params, want.opt_state)), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=2e-5)


def test_only_float32_leaves(monkeypatch):
    """bfloat16 is rounded stochastically by the composed form; other devices have no kernel."""
    monkeypatch.setattr(cuda_kernels, "has_cuda", lambda: True)
    leaf, short = mx.zeros((2, 2)), mx.zeros((2, 2), mx.bfloat16)
    assert takes_leaf(leaf, leaf, leaf) and not takes_leaf(leaf, leaf, short) and not takes_leaf(short)
    assert not takes_leaf(mx.zeros((0, 2)))
    monkeypatch.setattr(cuda_kernels, "has_cuda", lambda: False)
    assert not takes_leaf(leaf, leaf, leaf)
