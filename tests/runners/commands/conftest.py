"""Runs each test of a command in a folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    """Makes an empty folder the current one."""
    monkeypatch.chdir(tmp_path)
