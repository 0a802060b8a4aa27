"""docs/architecture.md is true: its paths exist; each mechanism has its files, tests and off-switch, as in
`benchmarks.mechanisms`.
"""

import re

import pytest

from benchmarks import mechanisms
from grpo_fn.backends import OPERATIONS, SWITCHES
from runners.config.loading import load_config
from tests.support.pages import ROOT, codes, tables

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
_TOP = "grpo_fn|runners|configs|benchmarks|tests|docs"
PATHS = sorted(set(re.findall(rf"(?<![\w/.])(?:{_TOP})(?:/[\w.-]+)+", TEXT)))


def rows_of(*columns):
    """The rows of the page's tables with these columns."""
    found = [table for table in tables(PAGE) if table.header == columns]
    assert found, columns
    return [row for table in found for row in table.rows]


def test_paths_of_the_page_exist():
    """A file or a folder that the page names is there, and the page stays short."""
    assert len(PATHS) > 60 and len(TEXT.splitlines()) <= 200
    assert [path for path in PATHS if not (ROOT / path.rstrip(".-")).exists()] == []


MECHANISMS = rows_of("mechanism", "what it does", "where", "off-switch", "test")


@pytest.mark.parametrize("row", MECHANISMS, ids=lambda row: row[0])
def test_a_mechanism_names_its_files_and_a_test(row):
    where, tests = codes(row[2]), codes(row[-1])
    assert where and tests and all(row)
    assert all(path.startswith("tests/") for path in tests)


def test_titles_of_mechanisms_are_those_of_the_benchmark():
    """What is measured has its row, and no row stands twice."""
    titles = [row[0] for row in MECHANISMS]
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
    found = {name for row in MECHANISMS for name in re.findall(r'"(\w+)"', " ".join(codes(row[3])))}
    assert found - {"eval", "never"} <= OPERATIONS.keys() | SWITCHES.keys()  # values of config keys
    assert SWITCHES.keys() <= found
