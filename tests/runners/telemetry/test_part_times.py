"""Where the time of an update went."""

import pytest

from runners.telemetry.part_times import PARTS, PartTimes
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import config_in, lines_of


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


@pytest.mark.parametrize("setting", ["num_iterations", "gradient_accumulation_steps"])
def test_a_run_logs_where_its_time_goes(setting, tmp_path):
    """Each update's parts are its step_time; where a rollout serves two updates, the second has none."""
    config = config_in(tmp_path / "runs", f"optim.{setting}=2")
    lines = lines_of(run_training(config, report=Quiet()).folder / "training_log.jsonl")
    updates = [line for line in lines if "loss" in line]
    assert len(updates) > 1
    for number, line in enumerate(updates):
        parts = {part: line[f"time/{part}"] for part in (*PARTS, "rest")}
        assert sum(parts.values()) == pytest.approx(line["step_time"]) and min(parts.values()) >= 0
        assert parts["learner"] > 0 and parts["update"] > 0
        assert (parts["rollout"] > 0) == (setting != "num_iterations" or number % 2 == 0)
