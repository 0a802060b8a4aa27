"""The settings that a run has recorded in its folder. The file is untrusted, like the folder.

Only the config's own keys with possible values are taken, as values. Anything else in the file does
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runners.config.loading import SECTIONS, known_values
from runners.config.reading import Settings, parse
from runners.errors import UserError
from runners.files.json_files import open_file
from runners.files.run_files import RESOLVED


def run_of(model: str) -> Path | None:
    """The config.resolved.json of the run that a folder is or belongs to; None if there is
    no run.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    files = (place / RESOLVED for place in (folder, folder.resolve().parent))
    return next(filter(Path.is_file, files), None)


def read_recorded(file: Path) -> dict[str, dict[str, Any]]:
    """The values in a run's config.resolved.json, by section and key, in JSON's types.

    Raises UserError if it cannot be read as a JSON object, and for a link or anything else but a
    file.
    """
    found = Settings(label=str(file), folder=Path())
    tables = parse(file, str(file), open_file)
    return {
        name: known_values((name,), table, found)
        for name, table in tables.items()
        if name in SECTIONS
    }


def recorded_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The values of the run in a folder; none if they cannot be read."""
    try:
        return read_recorded(folder / RESOLVED)
    except UserError:  # damaged, being replaced, or from before such files
        return {}
