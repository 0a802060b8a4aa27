"""Installed packages: the versions that the tests run with, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata

# The same ranges as in pyproject.toml: this project uses parts of both that may change.
TESTED = {"mlx": ">=0.32.4,<0.33", "mlx-lm": ">=0.32.2,<0.33"}


def installed_version(distribution: str) -> str | None:
    """The installed version, read from the metadata without an import; None: not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested_versions() -> tuple[str, ...]:
    """A line for each of `TESTED` whose installed version is outside its range."""
    from packaging.specifiers import SpecifierSet

    found = {name: installed_version(name) for name in TESTED}
    return tuple(
        f"{name} {version} is not a tested version ({TESTED[name]}); if something fails: "
        f"pip install '{name}{TESTED[name]}'"
        for name, version in found.items()
        if version is not None and not SpecifierSet(TESTED[name]).contains(version, prereleases=True)
    )


def install_hint(*extras: str) -> str:
    """How to install one of these extras of pyproject.toml.

    grpo_fn is on no package index, and anyone could register its name there with any content.
    """
    wanted = " or ".join(f"'.[{name}]'" for name in extras)
    return f"pip install -e {wanted} in a clone of grpo_fn"
