"""Which configs this user has trained with: the code that they name has run here, and may run again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from runners.checkpoints.manifest import digest
from runners.files.cache_folder import cache_folder


def remember(config: Path) -> None:
    """Notes a run's config.resolved.json by its content; without room in the cache nothing is noted."""
    with suppress(OSError):
        _mark(config).parent.mkdir(parents=True, exist_ok=True)
        _mark(config).touch()


def is_own(config: Path) -> bool:
    """Whether this user has trained with exactly this config."""
    try:
        return _mark(config).exists()
    except OSError:
        return False


def _mark(config: Path) -> Path:
    return cache_folder() / "own-runs" / digest(config)
