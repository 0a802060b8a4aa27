"""Untrusted text in files reaches no config, card, terminal or interpreter unescaped."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.commands import grpo
from tests.support.hostile_texts import TEXTS, changes, make_files, try_commands


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The files before any change."""
    folder = tmp_path_factory.mktemp("sound")
    make_files(folder)
    return folder


def tried(sound, change):
    """One change in a copy of the files."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(sound, Path(place) / "files"))
        try_commands(folder, change)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_text_in_any_field(sound, data):
    """The texts are in fields and names of a model's, a data set's and a run's files, for all commands."""
    tried(sound, data.draw(changes(sound)))


def test_doctor_shows_no_foreign_text(monkeypatch, tmp_path):
    """It reads no untrusted file, and it escapes the names that it is given."""
    for text in TEXTS:
        monkeypatch.setenv("GRPO_FN_BLAS", text.replace("\ud83d", "").replace("\0", "") or "none")
        said = grpo("doctor", code=None).output
        assert "FORGED" not in [line[:6] for line in said.split("\n")] and "\x1b" not in said
