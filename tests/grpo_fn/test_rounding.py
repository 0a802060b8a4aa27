"""Stochastic rounding, number by number and bit by bit, against NumPy's view of the two formats."""

import mlx.core as mx
import numpy as np
import pytest

from grpo_fn.rounding import stochastic_round, storing

KEY = mx.random.key(11)
LARGEST = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
# Between neighbours of many sizes: plain, around powers of two, subnormal, and the last gap of all.
BETWEEN = [
    1.003, 0.3, 1e-6, 12345.678, 2 + 2.0**-20, 1 + 2.0**-23, 3e-39, 1.2e-40, 1e-45,
    *(np.nextafter(np.float32(x), np.float32(0)) for x in (2, 1, 2.0**-126, LARGEST)),
]  # fmt: skip


def upper_half(array):
    """The bits of bfloat16 numbers, uint16."""
    return np.array(array.view(mx.uint16))


def as_double(bits):
    """The numbers with these upper halves, float64."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def neighbours(x):
    """What lies below and above each number's magnitude in bfloat16, signed, float64."""
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    return as_double(bits), as_double(bits + np.uint16(1))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("compile", [False, True])
def test_the_mean_is_the_number(sign, compile):
    """Neighbours and nothing else, with a mean within five standard errors, in all ranges of the format."""
    draws = 40_000
    x = sign * np.array(BETWEEN, np.float32)
    low, high = neighbours(x)
    function = mx.compile(stochastic_round) if compile else stochastic_round
    found = as_double(upper_half(function(mx.repeat(mx.array(x)[None], draws, axis=0), KEY)))
    assert ((found == low) | (found == high)).all()
    share = (x.astype(np.float64) - low) / (high - low)
    error = np.abs(high - low) * np.sqrt(share * (1 - share) / draws)
    assert (np.abs(found.mean(axis=0) - x.astype(np.float64)) <= 5 * error).all()


@pytest.mark.parametrize("compile", [False, True])
def test_what_bfloat16_has_stays_bit_for_bit(compile):
    """All 65,536 patterns: numbers, both zeros, subnormals, infinities; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = mx.array((bits.astype(np.uint32) << 16).view(np.float32))
    function = mx.compile(stochastic_round) if compile else stochastic_round
    found = upper_half(function(values, KEY))
    nan = np.isnan(as_double(bits))
    assert (found[~nan] == bits[~nan]).all() and np.isnan(as_double(found[nan])).all()


def test_any_bits_round_to_a_neighbour():
    """Random patterns of float32: finite stays finite, signs stay, NaN of every payload stays NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    edges = [0x7F7F0001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF]
    x = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    out = upper_half(stochastic_round(mx.array(x), KEY))
    found = as_double(out)
    assert (np.isnan(found) == np.isnan(x)).all() and (np.isinf(found) == np.isinf(x)).all()
    assert ((out >> 15) == (x.view(np.uint32) >> 31)).all()
    finite = np.isfinite(x)
    low, high = neighbours(x[finite])
    beyond = np.abs(x[finite]) > LARGEST
    assert ((found[finite] == low) | ((found[finite] == high) & ~beyond)).all()


@pytest.mark.parametrize("compile", [False, True])
def test_float16_is_drawn_alike(compile):
    """All numbers of the format stay; others become a neighbour of NumPy's, with themselves as the mean."""

    def rounded(x):
        return stochastic_round(x, KEY, mx.float16)

    function = mx.compile(rounded) if compile else rounded
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    same = np.array(function(mx.array(every.astype(np.float32))))
    assert ((same == every) | (np.isnan(same) & np.isnan(every))).all()
    sizes = [1.003, 0.3, 12345.678, 2 - 2**-12, 1 + 2**-23, 6.1e-5, 1e-6, 2e-8, 65_000.4, 1e9]
    x, draws, most = np.array([*sizes, *(-size for size in sizes)], np.float32), 40_000, np.float16(65_504)
    found = np.array(function(mx.repeat(mx.array(x)[None], draws, axis=0))).astype(np.float64)
    x = np.clip(x, -most, most)
    near = x.astype(np.float16)
    low = np.where(near > x, np.nextafter(near, -most), near)
    high = np.where(near < x, np.nextafter(near, most), near).astype(np.float64)
    assert ((found == low) | (found == high)).all()
    gap = high - low
    share = (x - low) / np.where(gap > 0, gap, 1)
    error = gap * (np.sqrt(share * (1 - share) / draws) * 5 + 2**-13)
    assert (np.abs(found.mean(axis=0) - x) <= error).all()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (3, 5, 2)])
def test_any_shape(shape):
    """Numbers of bits that are no multiple of four, scalars and empty arrays."""
    found = stochastic_round(mx.full(shape, 1.001), KEY)
    assert found.shape == shape and found.dtype == mx.bfloat16
    assert set(np.array(found.astype(mx.float32)).reshape(-1).tolist()) <= {1.0, 1.0078125}


def test_a_key_decides_and_neighbouring_draws_are_independent():
    """Equal keys, equal bits, compiled or not; another key, others; no correlation between places or keys."""
    size = 1 << 16
    x = mx.full((size,), 1 + 2.0**-8)  # midway

    def ups(key, function=stochastic_round):
        return np.array(function(x, key) > 1).astype(np.float64) - 0.5

    one, other = ups(KEY), ups(mx.random.split(KEY)[0])
    assert (one == ups(KEY)).all() and (one == ups(KEY, mx.compile(stochastic_round))).all()
    pairs = [(one, other), *((one[:-lag], one[lag:]) for lag in (1, 2, 3, 4, 8, size // 2))]
    for a, b in pairs:
        assert abs((a * b).mean()) / 0.25 < 5 / np.sqrt(len(a))


def test_other_dtypes_are_refused():
    """The message names what was found and what is wanted."""
    with pytest.raises(ValueError, match=r"x is mlx.core.float16, expected mlx.core.float32"):
        stochastic_round(mx.zeros((2,), mx.float16), KEY)
    with pytest.raises(ValueError, match=r"the result is mlx.core.float32, expected mlx.core.bfloat16"):
        stochastic_round(mx.zeros((2,)), KEY, mx.float32)


def test_a_leaf_is_stored_in_its_own_dtype_and_with_its_own_draws():
    """float32 into 16 bits is rounded at random, anything else as ever; equal leaves draw differently."""
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
