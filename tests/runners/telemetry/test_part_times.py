"""Where the time of an update went."""

from runners.telemetry.part_times import PARTS, PartTimes


def test_parts_and_rest_add_up():
    """By a clock that is turned by hand."""
    now = [10.0]
    times = PartTimes(lambda: now[0])
    times.add("rollout", 2.0)
    now[0] += 2.5
    with times.timing("learner"):
        now[0] += 4
    found = times.take()
    assert found["step_time"] == 6.5 and found["time/rollout"] == 2 and found["time/learner"] == 4
    assert found["time/rest"] == 0.5 and found["time/sync"] == 0
    with times.timing("sync"):
        now[0] += 1
    with times.stopped():
        now[0] += 100  # an evaluation
    assert times.take() == {
        "step_time": 1.0, "time/rest": 0.0, **{f"time/{part}": float(part == "sync") for part in PARTS}
    }  # fmt: skip
