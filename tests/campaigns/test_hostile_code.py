"""Tools and rewards that fork, block, exit and flood: no run waits for them longer than their time limits.

`python -m tests.campaigns.hostile_code` has each kind alone and all together, in both schedules, and ranks.
"""

import pytest

from tests.campaigns.hostile_code import ended_in_time
from tests.support.runs.hostile_code import ACTS


@pytest.mark.parametrize(
    ("acts", "schedule", "ranks"), [(ACTS[::2], "together", 2), (ACTS[1::2], "arrival", 1)]
)
def test_a_run_ends_with_all_its_updates(tmp_path, acts, schedule, ranks):
    """Half of the kinds each; nothing is left of any."""
    assert ended_in_time(tmp_path / "run", acts, schedule, ranks)
