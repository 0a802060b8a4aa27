"""Which configs this user has trained with: the code that they name has run here, and may run again."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from runners.files.cache_folder import cache_folder
from runners.files.durable import save_text

_MOST = 10_000  # configs that are kept


def remember(config: Path) -> None:
    """Notes a run's config.resolved.json by its content; without room in the cache nothing is noted."""
    with suppress(OSError, ValueError):
        file = cache_folder() / "own-runs.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        known = [*dict.fromkeys([*_known(file), _digest(config)])]
        save_text(file, "".join(f"{each}\n" for each in known[-_MOST:]))


def is_own(config: Path) -> bool:
    """Whether this user has trained with exactly this config."""
    try:
        return _digest(config) in _known(cache_folder() / "own-runs.txt")
    except (OSError, ValueError):
        return False


def _digest(config: Path) -> str:
    return hashlib.sha256(config.read_bytes()).hexdigest()


def _known(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").split() if file.is_file() else []
