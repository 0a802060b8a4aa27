"""Reports installed packages, and how to install missing ones."""

from __future__ import annotations

import importlib.metadata


def installed_version(distribution: str) -> str | None:
    """The installed version, read from the metadata without an import; None if it is not
    installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_hint(*extras: str) -> str:
    """The command that installs one of the extras of pyproject.toml.

    grpo_fn is not on a package index; anyone could register its name there with any content.
    """
    wanted = " or ".join(f"'.[{name}]'" for name in extras)
    return f"pip install -e {wanted} in a clone of grpo_fn"
