"""The table of mechanisms and `benchmarks.mechanisms`: the same rows, and real off-switches."""

import re

import mlx.core as mx
import pytest

from benchmarks import mechanisms
from benchmarks.harness import step_side
from grpo_fn.backends import OPERATIONS, SWITCHES
from runners.config.loading import load_config
from runners.errors import UserError
from tests.support.pages import ROOT, codes, tables

COLUMNS = ("mechanism", "what it does", "where", "off-switch", "test")
ROWS = [
    row
    for table in tables(ROOT / "docs" / "architecture.md")
    if table.header == COLUMNS
    for row in table.rows
]


def test_a_step_begins_with_arrays_of_its_own():
    """What was one array in two places is one again, with its dtype; the copies stay as they were."""
    weight = mx.array([1.0, 2.5], mx.bfloat16)
    copy = step_side.HostCopy({"params": [weight], "old_params": [weight], "step": mx.array(3)})
    for _ in range(2):
        found = copy.arrays()
        (first,), (second,) = found["params"], found["old_params"]
        assert first is second and first is not weight
        assert first.dtype == mx.bfloat16 and first.tolist() == [1.0, 2.5] and found["step"].item() == 3
        assert found["step"].dtype == mx.int32


def test_each_mechanism_that_is_measured_has_one_row():
    titles = [row[0] for row in ROWS]
    assert len(set(titles)) == len(titles)
    assert [title for title in mechanisms.TITLES if title not in titles] == []


@pytest.mark.parametrize("mechanism", mechanisms.MECHANISMS, ids=lambda mechanism: mechanism.title)
def test_a_measured_mechanism_can_be_turned_off(mechanism):
    """Its names and config keys exist; there is one way at least."""
    assert {*mechanism.disable} <= OPERATIONS.keys() | SWITCHES.keys()
    load_config("quickstart", mechanism.overrides)
    assert mechanism.disable or mechanism.overrides or mechanism.environment


def test_every_off_switch_of_the_page_exists_and_every_switch_is_there():
    """`disable("…")` in the table names what there is; a switch that no row names would not be found."""
    found = {name for row in ROWS for name in re.findall(r'"(\w+)"', " ".join(codes(row[3])))}
    known = OPERATIONS.keys() | SWITCHES.keys()
    keys = {"eval", "never"}  # values of config keys
    assert found - keys <= known
    assert SWITCHES.keys() <= found


def test_a_side_that_samples_another_number_of_tokens_ends_the_benchmark():
    """The sides did other work: their times cannot be compared."""

    class Fake:
        def __init__(self, name, tokens):
            self.name, self.tokens = name, tokens

        def step(self):
            return {"seconds": 2.0, "cpu": 4.0, "peak": 8, "tokens": self.tokens}

    ratios = mechanisms.compare(Fake("on", 100), Fake("off", 104), 2, adds=False)
    assert {name: ratio.paired for name, ratio in ratios.items()} == {"time": 1, "CPU time": 1, "peak": 1}
    with pytest.raises(UserError, match="off: the sides sampled 200 and 212 tokens"):
        mechanisms.compare(Fake("on", 100), Fake("off", 106), 2, adds=False)
