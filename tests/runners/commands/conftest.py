"""Each test of a command runs in a folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    """The current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
