"""TOML written from values reads back to the same values, whatever texts they contain."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

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
    """Keys, texts and comments may contain quotes, brackets, line ends and control characters."""
    notes = {(name, key): note for name, table in tables.items() for key in table}
    text = toml_text(tables, notes, note)
    assert tomllib.loads(text) == tables
    assert not any((ord(letter) < 32 and letter != "\n") or 0x7F <= ord(letter) < 0xA0 for letter in text)


def test_a_value_that_is_none_is_left_out():
    """TOML has no null."""
    assert tomllib.loads(toml_text({"a": {"b": None, "c": 1}})) == {"a": {"c": 1}}
