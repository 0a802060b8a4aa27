"""The price of a new shape of the learner, in tokens of padding."""

import pytest

from grpo_fn.backends import cpu, cuda
from runners.training import steps
from runners.training.steps import new_shape_tokens


@pytest.mark.parametrize(
    "numbers, parameters, tokens",
    [
        (cpu.NUMBERS, 500_000, 1_000),
        (cpu.NUMBERS, 2_500_000, 1_000),
        (cpu.NUMBERS, 500_000_000, 5),
        (cuda.NUMBERS, 500_000_000, 30_000),
    ],
)
def test_the_price_of_a_new_shape_falls_with_the_model_s_size(numbers, parameters, tokens, monkeypatch):
    """Below a bound models compute no faster. After an epoch hardly a new shape is accepted."""
    monkeypatch.setattr(steps, "number", numbers.__getitem__)
    assert new_shape_tokens(parameters, epoch=0) == tokens
    assert new_shape_tokens(parameters, epoch=1) == 1_000_000
