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
CORE = ROOT / "grpo_fn"
_TOP = "grpo_fn|runners|configs|benchmarks|tests|docs"
PATHS = sorted(set(re.findall(rf"(?<![\w/.])(?:{_TOP})(?:/[\w.-]+)+", TEXT)))


def rows_of(*columns):
    """The rows of the page's tables with these columns."""
    found = [table for table in tables(PAGE) if table.header == columns]
    assert found, columns
    return [row for table in found for row in table.rows]


def test_every_path_exists():
    """A file or a folder that the page names is there, and the page stays short."""
    assert len(PATHS) > 60 and len(TEXT.splitlines()) <= 200
    assert [path for path in PATHS if not (ROOT / path.rstrip(".-")).exists()] == []


def test_every_folder_is_on_the_page():
    """A new folder of the core or the shell gets its line."""
    found = [
        file.parent for package in ("grpo_fn", "runners") for file in ROOT.glob(f"{package}/*/__init__.py")
    ]
    folders = [folder.relative_to(ROOT).as_posix() for folder in found]
    assert [folder for folder in folders if not re.search(rf"^{folder}/ ", TEXT, re.MULTILINE)] == []


MECHANISMS = rows_of("mechanism", "what it does", "where", "off-switch", "test")


@pytest.mark.parametrize("row", MECHANISMS, ids=lambda row: row[0])
def test_a_mechanism_names_its_files_and_a_test(row):
    where, tests = codes(row[2]), codes(row[-1])
    assert where and tests and all(row)
    assert all(path.startswith("tests/") for path in tests)


def test_every_module_of_the_backends_is_a_mechanism():
    """What makes something faster, or is measured, has its row."""
    titles = [row[0] for row in MECHANISMS]
    assert len(set(titles)) == len(titles)
    assert [title for title in mechanisms.TITLES if title not in titles] == []
    named = {path for row in MECHANISMS for path in codes(row[2])}
    modules = [path for path in (CORE / "backends").glob("*/*.py") if path.name != "__init__.py"]
    shared = {"kernels.py"}  # what the kernels have in common
    paths = [path.relative_to(ROOT).as_posix() for path in modules if path.name not in shared]
    assert [path for path in paths if path not in named] == []


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
