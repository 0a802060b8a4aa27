"""Installed packages, and how to install what is missing."""

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
    """How to install one of the extras of pyproject.toml.

    grpo_fn is not on any package index, where anyone could register its name with any content.
    """
    wanted = " or ".join(f"'.[{name}]'" for name in extras)
    return f"pip install -e {wanted} in a clone of grpo_fn"
