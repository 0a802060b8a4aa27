"""Folders that are used again and hold what is loaded or believed: only their user may write to
them. One is in the user's cache, for facts about a machine or a model that are found out once.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from runners.errors import UserError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def own_folder(path: Path) -> Path:
    """The folder, created with its parents if it is missing. Raises OSError if the system refuses.

    Raises UserError if others could write there: in a shared folder such as /tmp, anybody could
        create a folder of this name first, and have programs loaded from it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = foreign(path)
    if found:
        raise UserError(
            f"{path}: expected your own folder that nobody else can write to, found {found}"
        )
    return path


def foreign(path: Path) -> str:
    """Why a folder cannot be trusted; empty if only this user can write to it. Raises OSError if it
    is missing.

    Links are followed only if they belong to this user too.
    """
    owner = os.lstat(path).st_uid
    facts = os.stat(path)
    if not stat.S_ISDIR(facts.st_mode):
        return "a file"
    others = {owner, facts.st_uid} - {os.geteuid()}
    if others:
        return f"one of user {others.pop()}"
    return f"one of mode {stat.S_IMODE(facts.st_mode):o}" if facts.st_mode & _OTHERS else ""


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
