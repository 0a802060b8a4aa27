"""The price of a new shape of the learner, in tokens of padding."""

import pytest

from grpo_fn.backends import cpu, cuda
from runners.training import steps
from runners.training.steps import new_shape_tokens


@pytest.mark.parametrize(
    "numbers, parameters, tokens, later",
    [
        (cpu.NUMBERS, 500_000, 1_000, 1_000_000),
        (cpu.NUMBERS, 2_500_000, 1_000, 1_000_000),
        (cpu.NUMBERS, 500_000_000, 5, 1_000_000),
        (cuda.NUMBERS, 500_000_000, 9_000, 9_000),
    ],
)
def test_the_price_of_a_new_shape_falls_with_the_model_s_size(
    numbers, parameters, tokens, later, monkeypatch
):
    """Below a bound models compute no faster. After an epoch a CPU accepts hardly a new shape."""
    monkeypatch.setattr(steps, "number", ({"launch": 0} | numbers).__getitem__)
    assert new_shape_tokens(parameters, epoch=0) == tokens
    assert new_shape_tokens(parameters, epoch=1) == later
