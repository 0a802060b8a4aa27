"""Tools and rewards that fork, block, exit and flood: no run waits for them longer than their time limits."""

import pytest

from tests.support.runs.hostile_code import ACTS, hostile_run


@pytest.mark.parametrize(
    ("acts", "schedule", "ranks"), [(ACTS[::2], "together", 2), (ACTS[1::2], "arrival", 1)]
)
def test_a_run_ends_with_all_its_updates(tmp_path, acts, schedule, ranks):
    """Half of the kinds each; nothing is left of any.

    A batch step has two turns of calls and a reward, each with a second, two more to be ended, and a restart.
    """
    spent = hostile_run(tmp_path / "run", acts, schedule, ranks, len(acts))
    assert spent < 60 + len(acts) * 30
