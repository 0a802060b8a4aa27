"""More kinds of architectures against mlx-lm's own models than the suite takes."""

import pytest

from tests.grpo_fn.policy.test_kinds import MORE, check_kind


@pytest.mark.parametrize("name", MORE, ids=MORE.get)
def test_a_kind(name):
    """Rollouts have the log-probs of mlx-lm's model on each row alone; the gradient is its own."""
    check_kind(name)
