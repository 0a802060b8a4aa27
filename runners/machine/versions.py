"""Reports installed packages, imports optional packages, and explains how to install
missing ones.
"""

import importlib
import importlib.metadata
from typing import Any

from runners.errors import UserError, first_line


def installed_version(distribution: str) -> str | None:
    """Reads the installed version from the metadata without an import. Returns None if the package
    is not installed.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module that belongs to an extra in pyproject.toml.

    Raises UserError if the module is not installed. The message contains the `purpose` and the
    command that installs the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == module.partition(".")[0]
        reason = "" if missing else f" ({first_line(error)})"
        raise UserError(f"{purpose}: {install_hint(extra)}{reason}") from error


def install_hint(*extras: str) -> str:
    """Returns the command that installs one of the extras in pyproject.toml.

    The command does not install grpo_fn from a package index, because anyone could register its
    name there with any content.
    """
    wanted = " or ".join(f"'.[{name}]'" for name in extras)
    return f"pip install -e {wanted} in a clone of grpo_fn"
