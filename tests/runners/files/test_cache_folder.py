"""The user's cache folder."""

import sys
from pathlib import Path

from runners.files.cache_folder import cache_folder


def test_the_users_cache_folder(monkeypatch, tmp_path):
    """GRPO_FN_CACHE, then XDG_CACHE_HOME, then ~/.cache; on macOS ~/Library/Caches."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("GRPO_FN_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "xdg" / "grpo_fn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "grpo_fn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "grpo_fn"
