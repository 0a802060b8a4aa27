"""Fixtures that several files here share."""

import pytest

from runners.config.loading import load_config


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads the text of a config, which is train.toml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def load_text(text, *overrides):
        (tmp_path / "train.toml").write_text(text, encoding="utf-8")
        return load_config("train.toml", overrides)

    return load_text
