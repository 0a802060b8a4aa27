"""Real processes under SIGKILL, a few of them; `python -m tests.kill_harness` does hundreds."""

from tests.kill_harness import hunt


def test_killed_runs_go_on_and_end_as_if_they_had_not_been(tmp_path):
    """A run that is killed three times, mostly while it saves: nothing lost, nothing different."""
    tally = hunt(tmp_path, 3, kinds=("quantized",), most=3, seed=1)
    assert tally.problems == []
    assert (tally.kills, tally.runs) == (3, 1)
