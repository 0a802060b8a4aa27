"""The long run of `tests/runners/commands/test_hostile_texts.py`."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hostile_texts import changes, make_files, try_commands


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The files before anything is changed."""
    folder = tmp_path_factory.mktemp("sound")
    make_files(folder)
    return folder


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_text_in_any_field(sound, data):
    """Of a model's, a data set's and a run's files, and as their names; through every command."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(sound, Path(place) / "files"))
        try_commands(folder, data.draw(changes(sound)))
