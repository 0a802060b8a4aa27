"""Real processes under SIGKILL, a few of them; `python -m tests.campaigns.kill_harness` does hundreds."""

from tests.campaigns.kill_harness import hunt


def test_killed_runs_go_on_and_end_as_if_they_had_not_been(tmp_path):
    """Four kills, mostly while it saves, two of a model with experts and a curriculum: nothing lost, nothing
    different.

    A process that ends before its moment comes is not killed: then it takes a second run.
    """
    tally = hunt(tmp_path, 4, kinds=("quantized", "experts"), most=3, seed=1)
    assert tally.problems == []
    assert tally.kills == 4 and tally.runs >= 2


def test_killed_conversions_leave_the_old_folder_or_the_new_one(tmp_path):
    """Pairs of `grpo convert` and `grpo export` side by side, one of them killed, decoys around them."""
    tally = hunt(tmp_path, 2, kinds=("pairs",), most=2, seed=2)
    assert tally.problems == []
    assert tally.kills >= 2 and tally.pairs >= 2 and tally.runs >= 4
