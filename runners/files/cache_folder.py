"""The user's cache folder, for facts about a machine or a model that are found out once."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """This package's folder in the user's cache; the environment's GRPO_FN_CACHE names another one."""
    wish = os.environ.get("GRPO_FN_CACHE", "")
    if wish:
        return Path(wish)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_fn"
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "grpo_fn"
