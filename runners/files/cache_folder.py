"""The user's cache folder, for facts about a machine or a model that are found out once."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """This package's folder in the user's cache; the environment's GRPO_FN_CACHE names another one."""
    if wish := os.environ.get("GRPO_FN_CACHE", ""):
        return Path(wish)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_fn"
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "grpo_fn"


def remember(kind: str, digest: str) -> None:
    """Notes a digest, such as one of a content that was checked; without room for it nothing is noted."""
    with suppress(OSError):
        (cache_folder() / kind).mkdir(parents=True, exist_ok=True)
        (cache_folder() / kind / digest).touch()


def remembers(kind: str, digest: str) -> bool:
    """Whether `remember` has noted this."""
    return os.path.exists(cache_folder() / kind / digest)
