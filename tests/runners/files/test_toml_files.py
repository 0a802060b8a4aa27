"""TOML that is written from values: it reads back to the same values, whatever texts they hold."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import UserError
from runners.files.toml_files import toml_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
TABLES = st.dictionaries(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=4), max_size=3)


@given(TABLES, st.text())
def test_values_read_back_and_notes_add_nothing(tables, note):
    """Keys, texts and comments with quotes, brackets, line ends and controls stay what they are."""
    notes = {(name, key): note for name, table in tables.items() for key in table}
    text = toml_text(tables, notes, note)
    assert tomllib.loads(text) == tables
    assert not any((ord(letter) < 32 and letter != "\n") or 0x7F <= ord(letter) < 0xA0 for letter in text)


def test_what_toml_cannot_hold():
    """Half of a surrogate pair is one line; a value that is None is left out."""
    with pytest.raises(UserError, match=r"data\.source: expected text that UTF-8 can represent, found"):
        toml_text({"data": {"source": "rows\udcff.jsonl"}})
    assert tomllib.loads(toml_text({"a": {"b": None, "c": 1}})) == {"a": {"c": 1}}
