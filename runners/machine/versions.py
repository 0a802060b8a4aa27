"""Reports installed packages, imports optional ones, and says how to install missing ones."""

import importlib
import importlib.metadata
from typing import Any

from runners.errors import UserError, first_line


def installed_version(distribution: str) -> str | None:
    """Returns the installed version, read from the metadata without an import, or None if it is not
    installed.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module that an extra of pyproject.toml installs.

    Raises UserError, with the `purpose` and the command that installs it, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] == module.partition(".")[0]
        reason = "" if missing else f" ({first_line(error)})"
        raise UserError(f"{purpose}: {install_hint(extra)}{reason}") from error


def install_hint(*extras: str) -> str:
    """Returns the command that installs one of the extras of pyproject.toml.

    grpo_fn is not on a package index; anyone could register its name there with any content.
    """
    wanted = " or ".join(f"'.[{name}]'" for name in extras)
    return f"pip install -e {wanted} in a clone of grpo_fn"
