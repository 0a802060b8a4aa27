"""Rotary embeddings of one token as a product, against MLX's own."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from grpo_fn.backends.cpu.rotary import Rotation, rotations, takes_token, turned
from tests.support.tiny_policies import worst_difference

HEADS = mx.random.normal((3, 4, 1, 16), key=mx.random.key(0))


@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("position", [0, 1, 37, 1000])
def test_all_rows_at_one_position(base, position):
    wanted = mx.fast.rope(HEADS, 16, traditional=False, base=base, scale=1.0, offset=position)
    assert worst_difference(turned(HEADS, mx.array(position), base), wanted) < 1e-4


def test_a_position_for_each_row():
    positions = [0, 5, 512]
    found = turned(HEADS, mx.array(positions), 10000.0)
    for row, position in enumerate(positions):
        wanted = mx.fast.rope(
            HEADS[row : row + 1], 16, traditional=False, base=10000.0, scale=1.0, offset=position
        )
        assert worst_difference(found[row : row + 1], wanted) < 1e-4


def test_it_serves_one_token_at_a_position_in_an_array():
    at = mx.array(3)
    assert takes_token(HEADS, 16, at)
    assert not takes_token(HEADS, 16, 3), "a number of Python's: MLX's own kernel is one operation"
    assert not takes_token(HEADS, 8, at), "half of each head stays"
    assert not takes_token(mx.concatenate([HEADS, HEADS], axis=2), 16, at)
    assert not takes_token(HEADS.astype(mx.bfloat16), 16, at)


class Heads(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.rope = nn.RoPE(16, **options)


@pytest.mark.parametrize("options", [{}, {"base": 500.0}, {"traditional": True}, {"scale": 0.5}], ids=str)
def test_layers_turn_as_mlx_does(options):
    """One token and several; other ways to rotate are left to MLX, and everything comes back."""
    module, both = Heads(**options), mx.concatenate([HEADS, HEADS], axis=2)
    plain, at = module.rope, mx.array(21)
    with rotations(module):
        taken = "traditional" not in options and "scale" not in options
        assert (type(module.rope) is Rotation) == taken
        for x in (HEADS, both):
            assert worst_difference(module.rope(x, offset=at), plain(x, offset=at)) < 1e-4
    assert module.rope is plain
