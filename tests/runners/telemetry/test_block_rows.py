"""Rows of the live block: rewards with their last change, lengths, times."""

import io

import pytest
from rich.console import Console, Group

from runners.telemetry.block_rows import detail_rows
from runners.telemetry.events import Updated
from runners.telemetry.progress import Progress

METRICS = {
    "update": 2,
    "rewards/a/mean": 0.5,
    "rewards/judge.b/mean": 1.0,
    "rewards/c/mean": float("nan"),
    "completions/min_length": 3.0,
    "completions/mean_length": 20.5,
    "completions/max_length": 64.0,
    "completions/clipped_ratio": 0.25,
    "step_time": 2.0,
    "time/rollout": 1.5,
    "time/learner": 0.4,
    "time/sync": 0.001,
    "time/eval": 9.0,
}


def shown(*rows, width=80):
    """The lines that a terminal would show."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(Group(*rows))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def rows_of(*updates, width=80):
    """The lines after these updates."""
    progress = Progress(lambda: 0.0, lambda: 0)
    for metrics in updates:
        progress.handle(Updated(metrics))
    return shown(*detail_rows(progress, width), width=width)


def test_each_reward_has_its_value_and_its_last_change():
    """Up, down, none, and nothing to compare with; a reward without a value is none."""
    before = METRICS | {"rewards/a/mean": 0.75, "rewards/judge.b/mean": 0.25}
    assert [line.split() for line in rows_of(before, METRICS)[:3]] == [
        ["a", "0.500", "-0.250"],
        ["judge.b", "1.00", "+0.750"],
        ["c", "none"],
    ]
    assert rows_of(METRICS)[0].split() == ["a", "0.500"]
    assert rows_of(METRICS, METRICS)[0].split() == ["a", "0.500", "="]


def test_lengths_and_where_the_time_goes():
    """Shares of the update's own time, the largest first; what is below half a percent is left out."""
    lengths, times = rows_of(METRICS)[3:]
    assert lengths == "tokens a completion  3 to 64, mean 20.5, 25% cut off"
    assert times == "time 2.00 s  rollout 75%, learner 20%"
    assert rows_of({"update": 1, "reward": 0.5}) == []


@pytest.mark.parametrize("width", [20, 40, 100])
def test_no_row_wraps(width):
    """Long names and many rewards have their place at any width."""
    many = {f"rewards/{'long' * 20}{i}/mean": i / 7 for i in range(9)}
    lines = rows_of(METRICS | many, width=width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 6 + 1 + 2 and lines[6].strip().startswith("and 6")
