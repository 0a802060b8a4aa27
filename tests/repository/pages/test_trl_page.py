"""docs/migrating.md against TRL's own classes: every option is there, no other one, with TRL's default."""

import ast
import dataclasses
import inspect
import re

import pytest

from tests.support.pages import ROOT, codes, tables

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = ROOT / "docs/migrating.md"
ROWS = [row for table in tables(PAGE) if table.header[:2] == ("TRL", "here") for row in table.rows]
NO_DEFAULT = object()


def default_of(field: dataclasses.Field):
    """The default of a dataclass's field."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return NO_DEFAULT if field.default_factory is dataclasses.MISSING else field.default_factory()


@pytest.fixture(scope="module")
def options():
    """TRL's options with their defaults. Where two classes have one, it is the later class's."""
    trl = pytest.importorskip("trl", reason="needs TRL: pip install trl==1.16.0")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the page is about TRL 1.16, found {trl.__version__}")
    classes = (trl.ScriptArguments, trl.ModelConfig, trl.GRPOConfig)
    found = {field.name: default_of(field) for each in classes for field in dataclasses.fields(each)}
    parameters = inspect.signature(trl.GRPOTrainer.__init__).parameters
    return {name: NO_DEFAULT for name in parameters if name not in ("self", "args")} | found


def option_names(cell):
    """The options that a first cell names."""
    return [code.partition("=")[0] for code in codes(cell) if not code.startswith('"')]


def outside(cell):
    """A cell without its parentheses, in which older names, and those of others, are."""
    return re.sub(r"\(.*?\)", "", cell)


def test_every_option_of_trl_is_on_the_page_and_no_other(options):
    """By its name, in the first column; names in parentheses, and three of older versions, are no options."""
    assert options.keys() - {name for row in ROWS for name in option_names(row[0])} == set()
    named = {name for row in ROWS for name in option_names(outside(row[0]))}
    assert named - options.keys() == {"max_prompt_length", "overwrite_output_dir", "logging_dir"}


def test_defaults_are_those_of_trl(options):
    """Where the page has one for each option of its row."""
    compared = 0
    for row in ROWS:
        names, stated = option_names(outside(row[0])), codes(outside(row[2]))
        if len(stated) != len(names) or not all(each in options for each in names):
            continue
        for name, text in zip(names, stated, strict=True):
            if options[name] is not NO_DEFAULT:
                assert ast.literal_eval(text) == options[name], name
                compared += 1
    assert compared > 100


def test_what_is_not_here_has_a_reason():
    """A dash in the second column needs no TRL: the last column says why."""
    without = [row[0] for row in ROWS if row[1] == "–" and (not row[4] or "not offered" in row[4])]
    assert len(ROWS) > 90 and without == []
