"""Real processes under SIGKILL, a few of them; `python -m tests.campaigns.kills` does hundreds."""

import pytest

from tests.campaigns.kills import hunt


@pytest.mark.parametrize(
    "kinds", [("quantized", "experts"), ("ahead 1", "ahead 2"), ("2 ranks",), ("samplers 1",)]
)
def test_killed_runs_go_on_and_end_as_if_they_had_not_been(tmp_path, kinds):
    """Four kills, mostly during saves: nothing is lost, nothing differs."""
    tally = hunt(tmp_path, 4, kinds=kinds, most=3, seed=1)
    assert tally.problems == []
    assert tally.kills == 4 and tally.runs >= 2
