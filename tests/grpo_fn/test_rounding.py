"""Stochastic rounding, number by number and bit by bit, compared with NumPy's view of the formats."""

import math

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.backends.mechanisms import has_cuda
from grpo_fn.rounding import stochastic_round, storing
from grpo_fn.trees import map_arrays
from tests.support.tiny_policies import memory_in_use, same_tree

KEY = mx.random.key(11)
FORMATS = {mx.bfloat16: 0.0, mx.float16: 2.0**-13}  # and the smallest share of a gap that can be drawn


def numbers_of(array):
    """The numbers of a 16-bit array, float64."""
    if array.dtype == mx.float16:
        return np.array(array).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (np.array(array.view(mx.uint16)).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def every_number(dtype):
    """All 65,536 patterns of a format."""
    return mx.array(np.arange(1 << 16, dtype=np.uint16)).view(dtype)


def neighbours(x, dtype):
    """The finite numbers of the format that are next to each x, below and above it, float64."""
    numbers = numbers_of(every_number(dtype))
    grid = np.unique(numbers[np.isfinite(numbers)])
    below, above = np.searchsorted(grid, x, side="right") - 1, np.searchsorted(grid, x)
    return grid[np.maximum(below, 0)], grid[np.minimum(above, len(grid) - 1)]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("compile", [False, True])
def test_the_mean_is_the_number(compile, dtype):
    """Neighbours of all sizes, with a mean within five standard errors; the format's own patterns stay."""

    def rounded(x):
        return stochastic_round(x, KEY, dtype)

    function, every = mx.compile(rounded) if compile else rounded, every_number(dtype)
    same, numbers = numbers_of(function(every.astype(mx.float32))), numbers_of(every)
    np.testing.assert_array_equal(same, numbers)
    signs = ~np.isnan(numbers) & (np.signbit(same) != np.signbit(numbers))
    assert not numbers[signs].any() and (dtype == mx.float16 or not signs.any()), "float16 has one zero"
    # Plain, around powers of two, subnormal, the last gap of bfloat16, and past that of float16.
    sizes = [1.003, 0.3, 1e-6, 12345.678, 2 + 2.0**-20, 1 + 2.0**-23, 3e-39, 1.2e-40, 1e-45, 6.1e-5, 2e-8]
    sizes += [65_000.4, 1e9, *(np.nextafter(np.float32(x), np.float32(0)) for x in (2, 1, 2.0**-126))]
    sizes.append(np.nextafter(np.float32(mx.finfo(mx.bfloat16).max), np.float32(0)))
    x, draws = np.array([*sizes, *(-size for size in sizes)], np.float32), 40_000
    found = numbers_of(function(mx.repeat(mx.array(x)[None], draws, axis=0)))
    low, high = neighbours(x, dtype)
    assert ((found == low) | (found == high)).all()
    most, gap, slack = mx.finfo(dtype).max, high - low, FORMATS[dtype]
    wanted = np.clip(x.astype(np.float64), -most, most)
    share = np.clip((wanted - low) / np.where(gap > 0, gap, 1), slack, 1 - slack)
    error = gap * (5 * np.sqrt(share * (1 - share) / draws) + slack)
    off = ~(np.abs(found.mean(axis=0) - wanted) <= error)
    assert not off.any(), x[off]


def test_any_bits_round_to_a_neighbour():
    """Random patterns of float32: finite stays finite, signs stay, NaN of every payload stays NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    edges = [0x7F7F0001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF]
    x = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    out = stochastic_round(mx.array(x), KEY)
    found = numbers_of(out)
    assert (np.isnan(found) == np.isnan(x)).all() and (np.isinf(found) == np.isinf(x)).all()
    assert ((np.array(out.view(mx.uint16)) >> 15) == (x.view(np.uint32) >> 31)).all()
    finite = np.isfinite(x)
    low, high = neighbours(x[finite], mx.bfloat16)
    assert ((found[finite] == low) | (found[finite] == high)).all()


def test_any_shape():
    """Also scalars, empty arrays and odd sizes; other dtypes are refused."""
    for shape in [(), (0, 3), (1,), (7,), (3, 5, 2)]:
        found = stochastic_round(mx.full(shape, 1.001), KEY)
        assert found.shape == shape and found.dtype == mx.bfloat16
        assert set(np.array(found.astype(mx.float32)).reshape(-1).tolist()) <= {1.0, 1.0078125}
    with pytest.raises(ValueError, match=r"x is mlx.core.float16, expected mlx.core.float32"):
        stochastic_round(mx.zeros((2,), mx.float16), KEY)
    with pytest.raises(ValueError, match=r"the result is mlx.core.float32, expected mlx.core.bfloat16"):
        stochastic_round(mx.zeros((2,)), KEY, mx.float32)


def test_a_key_decides_and_neighbouring_draws_are_independent():
    """Equal keys give equal bits; places and keys are uncorrelated."""
    size = 1 << 16
    x = mx.full((size,), 1 + 2.0**-8)  # midway

    def ups(key, function=stochastic_round):
        return np.array(function(x, key) > 1).astype(np.float64) - 0.5

    one, other = ups(KEY), ups(mx.random.split(KEY)[0])
    assert (one == ups(KEY)).all() and (one == ups(KEY, mx.compile(stochastic_round))).all()
    pairs = [(one, other), *((one[:-lag], one[lag:]) for lag in (1, 2, 3, 4, 8, size // 2))]
    for a, b in pairs:
        assert abs((a * b).mean()) / 0.25 < 5 / np.sqrt(len(a))


def test_a_leaf_is_stored_in_its_own_dtype_and_with_its_own_draws():
    """Only float32 into 16 bits is random; equal leaves round differently."""
    value, fine = mx.full((1000,), 1 + 2.0**-8), mx.full((1000,), 1 + 2.0**-11)
    half = value.astype(mx.bfloat16)
    store = storing([half] * 5, KEY)
    ups = []
    for number in (value, value, fine):
        dtype = mx.float16 if number is fine else mx.bfloat16
        found = store(number, number.astype(dtype))
        assert found.dtype == dtype
        ups.append(np.array(found > 1))
    assert all(400 < up.sum() < 600 for up in ups) and 400 < (ups[0] == ups[1]).sum() < 600
    assert mx.array_equal(store(value, value), value)
    assert mx.array_equal(store(half, half), half)
    with pytest.raises(StopIteration):
        store(value, half)
    assert (np.array(storing([half] * 6, KEY)(value, half) > 1) == ups[0]).all()


RATE = 1e-6
DTYPES = [(mx.bfloat16, mx.float32), (mx.bfloat16, mx.bfloat16)]


def to_nearest(optimizer):
    """The optimizer with rounding to nearest: `keep` gets new values in the old ones' dtype."""

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
    """The mean distance that leaf "w" moved, float64."""
    return np.array(state.params["w"].astype(mx.float32), np.float64).mean() - start


@pytest.mark.parametrize("start", [1.0, -1.0])
def test_at_1e_6_plain_bfloat16_stands_still_and_rounded_follows_float32(start):
    """Sixty updates of weights of size 1: plain bfloat16 does not move."""
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
    """The second moment moves by a thousandth per update, which rounding to nearest loses."""
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


@pytest.mark.parametrize(("bad", "compile"), [(math.nan, True), (math.inf, False)])
def test_a_skipped_update_leaves_every_bit(bad, compile):
    """Masters and moments in bfloat16, after an update and before one that is skipped."""
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
    """Equal states give equal bits; another key, update or leaf gives others."""
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
    """No second tree of weights, moments or gradients; CUDA keeps ten buffers, so it gets more leaves."""
    size, leaves = 4096, 1600 if has_cuda() else 400
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
    """Mixing in a thousandth moves a bfloat16 reference by that much on average."""
    size = 1 << 16
    state = state_of({"w": mx.full((size,), 1.5, mx.bfloat16)}, g.adamw(RATE))
    state = attrs.evolve(state, ref_params={"w": mx.ones((size,), mx.bfloat16)})
    found = g.sync_ref(state, 0.001).ref_params
    assert found["w"].dtype == mx.bfloat16
    moved = np.array(found["w"].astype(mx.float32), np.float64).mean() - 1
    assert moved == pytest.approx(0.0005, rel=0.1)
