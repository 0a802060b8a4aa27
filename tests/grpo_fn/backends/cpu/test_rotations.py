"""Rotary embeddings on a CPU, against NumPy in float64 and against MLX's own."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from grpo_fn.backends import disabled, find
from grpo_fn.backends.cpu.rotations import rope, takes_heads
from grpo_fn.backends.decoding import shared_positions
from grpo_fn.policy.layers.patched_layers import patch_layers


def turned(x, positions_bl, base, back=False):
    """In NumPy float64: the halves of each head turned by position · base^(−2j/D), or back."""
    half = x.shape[-1] // 2
    angles = positions_bl[:, None, :, None] * base ** (-np.arange(half) / half) * (-1 if back else 1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1
    )


@pytest.mark.parametrize("offset", [0, 5, 2000, [0, 3, 1023]], ids=["0", "5", "far", "rows"])
@pytest.mark.parametrize("behind", [False, True], ids=["heads first", "positions first"])
def test_values_and_gradients(offset, behind):
    """One first position for all rows, or one for each. An angle's error grows with it, as MLX's does."""
    length = 9
    shape = (3, length, 2, 32) if behind else (3, 2, length, 32)
    x, g = (mx.random.normal(shape, key=key) for key in mx.random.split(mx.random.key(length), 2))
    if behind:
        x, g = x.swapaxes(1, 2), g.swapaxes(1, 2)
    first = np.broadcast_to(np.asarray(offset), (3,))
    positions = (first[:, None] + np.arange(length)).astype(np.float64)
    given = offset if isinstance(offset, int) else mx.array(offset, mx.int32)
    (value,), (gradient,) = mx.vjp(lambda x: rope(x, 10000.0, given), [x], [g])
    bound = 1e-6 + 2e-7 * positions.max()
    assert np.abs(np.array(value) - turned(np.array(x), positions, 10000.0)).max() < bound
    assert np.abs(np.array(gradient) - turned(np.array(g), positions, 10000.0, back=True)).max() < bound


@pytest.mark.parametrize("rows", [False, True], ids=["one position", "rows"])
def test_one_token(rows):
    """Each step has its own positions, of which cosines and sines are computed once for two layers."""
    x, y = mx.random.normal((2, 3, 4, 1, 32), key=mx.random.key(2))
    for position in (7, 8, 1000):
        positions = np.array([[position], [position + 5 * rows], [position + 2 * rows]])
        given = shared_positions(mx.array(positions[:, 0]), 0) if rows else position
        for heads in (x, y):
            assert takes_heads(heads, 32, given)
            wanted = turned(np.array(heads), positions, 10000.0)
            assert (
                np.abs(np.array(rope(heads, 10000.0, given)) - wanted).max() < 1e-6 + 2e-7 * positions.max()
            )
    assert rope(x, 500.0, 7).shape == x.shape and not mx.allclose(rope(x, 500.0, 7), rope(x, 10000.0, 7))


def test_threads_have_their_own():
    """Tables that one thread has made serve another; positions that one shares are not another's."""
    heads, given = mx.random.normal((2, 3, 1, 32)), shared_positions(mx.array([1, 2]), 0)
    mx.eval(heads)
    here = rope(heads, 10000.0, 11)  # not computed yet
    with ThreadPoolExecutor(1) as other:
        there = other.submit(lambda: rope(heads, 10000.0, 11).tolist()).result()
        assert not other.submit(takes_heads, heads, 32, given).result()
    assert here.tolist() == there and takes_heads(heads, 32, given)


def test_positions_of_one_token_that_may_change_in_place_are_not_taken():
    """mlx-lm's caches add to theirs: what was computed of them before would be another step's."""
    heads, theirs = mx.zeros((2, 3, 1, 32)), mx.array([1, 2])
    assert not takes_heads(heads, 32, theirs)
    shared_positions(mx.array([1, 2]), 0)
    assert not takes_heads(heads, 32, theirs)


def test_what_it_takes():
    """float32 heads that turn whole; positions that are a number or one for each row."""
    x = mx.zeros((2, 3, 5, 32))
    assert takes_heads(x, 32, 0) and takes_heads(x, 32, mx.array([1, 2]))
    assert not takes_heads(x.astype(mx.bfloat16), 32, 0)
    assert not takes_heads(x, 16, 0)
    assert not takes_heads(x[0], 32, 0)
    assert not takes_heads(x, 32, mx.zeros((2, 5), mx.int32)) and not takes_heads(x, 32, None)


@pytest.mark.skipif(find("rope", mx.zeros((1, 1, 2, 8)), 8, 3) is not rope, reason="needs a CPU")
@pytest.mark.parametrize(
    "options", [{}, {"traditional": True}, {"scale": 0.5}], ids=["plain", "pairs", "scaled"]
)
def test_a_layer_uses_it(options):
    """A plain layer calls it, one that turns pairs or scales positions does not; the numbers are mlx.nn's."""
    x, offset = mx.random.normal((2, 3, 5, 32), key=mx.random.key(1)), mx.array([0, 7], mx.int32)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.rope = nn.RoPE(32, **options)

    block = Block()
    wanted = nn.RoPE(32, **options)(x, offset)
    patch_layers(block)
    found = block.rope(x, offset)
    assert mx.allclose(found, wanted, atol=1e-5)
    assert mx.array_equal(found, wanted) == bool(options)
    with disabled("rope"):
        assert mx.array_equal(block.rope(x, offset), wanted)
