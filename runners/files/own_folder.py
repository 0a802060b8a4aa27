"""Manages persistent folders whose contents are loaded or trusted, so only their user may write to
them. One of these folders is in the user's cache, for facts about a machine or a model that are
determined once.
"""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from runners.errors import UserError


def own_folder(path: Path) -> Path:
    """Creates the folder and its parents if they are missing, and returns the folder. Raises
    OSError if that fails.

    Raises UserError if other users can write to the folder: in a shared folder such as /tmp,
    anybody could create a folder of this name first and put programs into it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = foreign(path)
    if found:
        raise UserError(
            f"{path}: expected a folder of this user that nobody else can write to, found {found}"
        )
    return path


def foreign(path: Path) -> str:
    """Returns the reason why a folder cannot be trusted, or "" if only this user can write to it.
    Raises OSError if the folder is missing.

    Links are followed only if they also belong to this user.
    """
    facts = os.stat(path)
    if not stat.S_ISDIR(facts.st_mode):
        return "a file"
    others = {os.lstat(path).st_uid, facts.st_uid} - {os.geteuid()}
    if others:
        return f"a folder of user {others.pop()}"
    is_open = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"a folder with mode {stat.S_IMODE(facts.st_mode):o}" if is_open else ""


def cache_folder() -> Path:
    """Returns this package's folder in the user's cache. The environment variable GRPO_FN_CACHE
    sets a different one.
    """
    wish = os.environ.get("GRPO_FN_CACHE", "")
    if wish:
        return Path(wish)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_fn"
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "grpo_fn"


def kept_folder(*names: str) -> Path:
    """Returns a folder in the user's cache, whose path consists of these names. The folder is
    created if it is missing.

    Raises OSError if that fails, and UserError if other users can write to this folder or to a
    parent folder in the cache.
    """
    place = own_folder(cache_folder())
    for name in names:
        place = own_folder(place / name)
    return place


def remember(kind: str, digest: str) -> None:
    """Records a digest, for example the digest of checked content. Nothing is recorded if other
    users can write to the cache, or if the disk is full.
    """
    with suppress(OSError, UserError):
        (kept_folder(kind) / digest).touch()


def remembers(kind: str, digest: str) -> bool:
    """Returns whether `remember` has recorded this digest. A cache to which other users can write
    is not trusted.
    """
    place = cache_folder() / kind
    return os.path.exists(place / digest) and not any(map(foreign, (place, place.parent)))
