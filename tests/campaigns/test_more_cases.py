"""More architectures and more kinds of runs than the suite takes."""

import pytest

from tests.grpo_fn.policy.test_kinds import MORE, check_kind
from tests.support.runs.forecasts import check_forecast


@pytest.mark.parametrize("name", MORE, ids=MORE.get)
def test_a_kind(name):
    """Rollouts have the log-probs of mlx-lm's model on each row alone; the gradient is its own."""
    check_kind(name)


@pytest.mark.parametrize("name", ["LoRA", "KL, packed 4-bit rollouts"])
def test_the_memory_forecast_is_within_its_bound_of_a_real_step(name):
    """Adapters, and three roles of two precisions."""
    check_forecast(name)
