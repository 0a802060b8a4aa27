"""The memory forecast against real steps, for more kinds of runs than the suite takes."""

import pytest

from tests.support.runs.forecasts import check_forecast


@pytest.mark.parametrize("name", ["LoRA", "KL, packed 4-bit rollouts"])
def test_the_forecast_is_within_its_bound_of_a_real_step(name):
    """Adapters, and three roles of two precisions."""
    check_forecast(name)
