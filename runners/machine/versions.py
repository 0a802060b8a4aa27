"""The versions of MLX and mlx-lm that the tests run with: this project uses parts of both that may change."""

from __future__ import annotations

import importlib.metadata

# The same ranges as in pyproject.toml.
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

    lines = []
    for name, wanted in TESTED.items():
        found = installed_version(name)
        if found is not None and not SpecifierSet(wanted).contains(found, prereleases=True):
            lines.append(
                f"{name} {found} is not a tested version ({wanted}); if something fails: "
                f"pip install '{name}{wanted}'"
            )
    return tuple(lines)
