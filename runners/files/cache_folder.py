"""The user's cache folder, for facts about a machine or a model that are found out once."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from runners.errors import UserError
from runners.files.own_folder import foreign, own_folder


def cache_folder() -> Path:
    """This package's folder in the user's cache; the environment's GRPO_FN_CACHE names
    another one.
    """
    wish = os.environ.get("GRPO_FN_CACHE", "")
    if wish:
        return Path(wish)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_fn"
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "grpo_fn"


def kept_folder(*names: str) -> Path:
    """A folder in the user's cache, by the names on the way to it, created if missing.

    Raises OSError if the system refuses, UserError if others can write to it or to one on the way.
    """
    place = own_folder(cache_folder())
    for name in names:
        place = own_folder(place / name)
    return place


def remember(kind: str, digest: str) -> None:
    """Notes a digest, such as one of a content that was checked; in a cache that others can write
    to, or without room, nothing is noted."""
    with suppress(OSError, UserError):
        (kept_folder(kind) / digest).touch()


def remembers(kind: str, digest: str) -> bool:
    """Whether `remember` has noted this. A cache that others can write to is not believed."""
    places = (cache_folder(), cache_folder() / kind)
    return os.path.exists(places[1] / digest) and not any(map(foreign, places))
