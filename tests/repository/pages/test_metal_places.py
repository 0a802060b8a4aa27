"""docs/memory.md names every place that asks for the backend, and every mechanism that Metal lacks."""

import re

from grpo_fn.backends import OPERATIONS
from grpo_fn.backends.mechanisms import NUMBERS
from tests.support.pages import ROOT, codes, tables

PAGE = ROOT / "docs" / "memory.md"
MECHANISMS = ("operation or constant", "asked for in", "on Metal, and why", "what to measure to change it")
PLACES = ("place", "what it decides", "on a Mac")
ASKS = re.compile(
    r"has_cuda\(\)|\bbackend\(\)|\bbackend [!=]=|\.backend\b|metal\.is_available|default_device|sys\.platform"
)
NAMED = re.compile(r'\b(?:find|number)\(\s*"(\w+)"')


def sources():
    """The files of both packages, but for the backends' own."""
    for package in ("grpo_fn", "runners"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("grpo_fn/backends/") or path.name == "composed.py":
                yield name, path.read_text(encoding="utf-8")


def rows_of(header):
    """The rows of the page's table with this header."""
    (found,) = (table.rows for table in tables(PAGE) if table.header == header)
    assert all(all(row) for row in found)
    return found


def test_the_page_names_every_mechanism_and_where_it_is_asked_for():
    """As the code asks; a constant that a compiled step asks for itself stands with the backends."""
    named = {(name, file) for row in rows_of(MECHANISMS) for name in codes(row[0]) for file in codes(row[1])}
    asked = {(name, file) for file, text in sources() for name in NAMED.findall(text)}
    assert asked - named == set(), "asked for, and not on the page"
    assert {name for name, _ in named} == OPERATIONS.keys() | NUMBERS.keys()
    assert named - asked == {("fuses_learner", "grpo_fn/backends/mechanisms.py")}


def test_the_page_names_every_place_that_asks_for_the_device():
    """Whichever way it asks."""
    named = [file for row in rows_of(PLACES) for file in codes(row[0])]
    assert len(set(named)) == len(named)
    assert {*named} == {file for file, text in sources() if ASKS.search(text)}
