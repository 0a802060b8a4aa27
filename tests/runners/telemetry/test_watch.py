"""Warnings about training that goes wrong, and conditions that end a run."""

import json
import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.checkpoints.values import decoded
from runners.config.conditions import Condition, condition_fault
from runners.config.loading import load_config
from runners.config.sections import WatchConfig
from runners.telemetry.run_watch import Seen, Watch

GOOD = {"frac_reward_zero_std": 0.2, "entropy": 0.5, "kl": 0.1}
FLAT = {"frac_reward_zero_std": 1.0, "reward": 0.0625, "learning_rate": 0.3}


def watching(settings, conditions):
    """A watch with these settings in [watch]."""
    return Watch(attrs.evolve(load_config("quickstart"), watch=settings), conditions)


def fed(watch, *readings, seen=None):
    """The warnings for each reading, and the final state."""
    seen, lines = seen or Seen(), []
    for reading in readings:
        seen, found = watch.see(reading, seen)
        lines.append(found)
    return lines, seen


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (FLAT, ["no group's completions", "reward now 0.0625", "lower optim.learning_rate (now 0.3)"]),
        ({"entropy": 0.01}, ["watch.min_entropy = 0.05", "now 0.01", "optim.learning_rate"]),
        ({"kl": 3.0}, ["watch.max_kl = 2", "now 3", "loss.beta"]),
    ],
)
def test_a_row_of_bad_updates_warns_once(bad, says):
    """The warning comes at the third consecutive update, once per series."""
    bad = {**GOOD, **bad}
    readings = [bad, bad, GOOD, bad, bad, bad, bad, GOOD, *[bad] * 3]
    lines, seen = fed(watching(WatchConfig(patience=3, min_entropy=0.05, max_kl=2.0), []), *readings)
    assert [len(found) for found in lines] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1] and seen.reached is None
    (line,) = lines[5]
    assert "\n" not in line and all(part in line for part in [*says, "for 3 updates"])


def test_a_constant_reward_is_pointed_out_once():
    """The values are equal, or missing, in each of the first updates; later series cause no warning."""

    def reading(update, std=0.0, mean=0.1):
        return {"update": update, "rewards/r/std": std, "rewards/r/mean": mean}

    def warned(*readings):
        lines, _ = fed(watching(WatchConfig(patience=3), []), *readings)
        return [line for found in lines for line in found]

    for mean in (0.1, 0.0, math.nan):
        (line,) = warned(*(reading(update, 0.0, mean) for update in range(1, 7)))
        assert line.startswith(
            "reward r returned the same value, or none, for all completions in each of the first 3"
        )
    assert warned(reading(1), reading(2, 1e-9), *map(reading, range(3, 9))) == []


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "x", True])
def test_what_is_no_number_is_no_reading(missing):
    """It does not change a count, because updates without tokens have no entropy."""
    low = {"entropy": 0.0, "kl": 2.0}
    readings = low, {"entropy": missing, "kl": missing}, {}, low
    lines, seen = fed(watching(WatchConfig(patience=2), [Condition("kl", ">", 1.0, 2)]), *readings)
    assert [len(found) for found in lines] == [0, 0, 0, 1] and seen.reached


CONDITIONS = {
    "em >= 0.95": Condition("em", ">=", 0.95),
    "kl>0.5 for 20": Condition("kl", ">", 0.5, 20),
    " rewards/mine.py:f/mean  <= -1e-3  for 1 ": Condition("rewards/mine.py:f/mean", "<=", -1e-3, 1),
    **dict.fromkeys(("kl", "kl > ", "kl = 3", "kl > x", "kl > nan", "kl > inf", "kl > 1 > 2")),
    **dict.fromkeys(("kl > 1 for 0", "kl > 1 for -2", "kl > 1 for")),
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_conditions_are_read(text):
    """A condition has a metric, a sign, a limit and a number of readings; other texts give None."""
    assert Condition.parse(text) == CONDITIONS[text]


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, None]), max_size=30),
    st.integers(1, 4),
    st.sampled_from(["<", "<=", ">", ">="]),
)
def test_a_condition_is_reached_at_the_end_of_its_first_row(values, readings, sign):
    """The naive reference looks for the first series of readings that all meet the condition."""
    holds = {"<": float.__lt__, "<=": float.__le__, ">": float.__gt__, ">=": float.__ge__}[sign]
    _, seen = fed(
        watching(WatchConfig(), [Condition("kl", sign, 1.0, readings)]), *({"kl": v} for v in values)
    )
    given = [value for value in values if value is not None]
    rows = [given[i : i + readings] for i in range(len(given) - readings + 1)]
    assert bool(seen.reached) == any(all(holds(value, 1.0) for value in row) for row in rows)


@given(st.lists(st.sampled_from([0.0, 3.0]), min_size=1, max_size=20), st.integers(0, 20))
def test_a_resumed_watch_goes_on_as_it_would_have(values, cut):
    """Its state, through JSON, is all that it needs."""
    watch = watching(WatchConfig(patience=3, max_kl=1.0), [Condition("kl", ">", 2.0, 4)])
    readings = [{"kl": v, "entropy": v / 100, "frac_reward_zero_std": float(v > 0)} for v in values]
    first, seen = fed(watch, *readings[:cut])
    seen = decoded(json.loads(json.dumps(attrs.asdict(seen))), Seen, "seen")
    second, seen = fed(watch, *readings[cut:], seen=seen)
    assert (first + second, seen) == fed(watch, *readings)


def test_a_reward_s_metric_may_have_its_whole_name():
    """If two functions have the same short name, only the whole name is unique."""
    assert condition_fault("rewards/mine.py:brevity/std > 0", ["mine.py:brevity"]) == ""
