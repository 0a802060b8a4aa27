"""Tools and rewards that fork, block, exit and flood: no run waits for them longer than their time limits."""

import pytest

from tests.support.runs.hostile_code import ACTS, hostile_run

MIXED = [(ACTS, schedule, ranks) for schedule in ("together", "arrival") for ranks in (1, 2)]


@pytest.mark.parametrize(("acts", "schedule", "ranks"), [*(((act,), "arrival", 1) for act in ACTS), *MIXED])
def test_a_run_ends_with_all_its_updates(tmp_path, acts, schedule, ranks):
    """Each kind alone, and all of them; nothing is left of any."""
    updates = 2 * len(acts) if len(acts) > 1 else 3
    # A batch step: two turns of calls and a reward, each with a second, two more to be ended, and a restart.
    assert hostile_run(tmp_path / "run", acts, schedule, ranks, updates) < 60 + updates * 30
