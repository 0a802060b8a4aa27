"""Folders that are used again and hold what is loaded or believed: only their user may write to
them.
"""

from __future__ import annotations

import os
import stat
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
