"""The table of mechanisms and `benchmarks.mechanisms`: the same rows, and real off-switches."""

import re

import pytest

from benchmarks import mechanisms
from grpo_fn.backends import OPERATIONS, SWITCHES
from runners.config.loading import load_config
from tests.support.pages import ROOT, codes, tables

COLUMNS = ("mechanism", "what it does", "where", "off-switch", "test")
ROWS = [
    row
    for table in tables(ROOT / "docs" / "architecture.md")
    if table.header == COLUMNS
    for row in table.rows
]


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
