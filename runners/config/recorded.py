"""The settings that a run has recorded in its folder. The file is untrusted, like the folder.

Only the config's own keys with possible values are taken, as values. Anything else in the file does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from runners.config.loading import SECTIONS, section_values
from runners.config.reading import Settings, parse
from runners.errors import UserError, one_line
from runners.files.json_files import open_file
from runners.files.run_files import RESOLVED


@attrs.frozen
class Recorded:
    """A run's config.resolved.json: values by section and key, in JSON's types."""

    file: Path
    values: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    faults: tuple[str, ...] = ()  # a line for every key that is unknown or has an impossible value

    def get(self, section: str, key: str) -> Any:
        """The value of a key; None if it is not recorded."""
        return self.values.get(section, {}).get(key)

    @property
    def notices(self) -> list[str]:
        """A line that entries of the file are not used; none if all are."""
        more = f"this and {len(self.faults) - 1} more are" if len(self.faults) > 1 else "it is"
        return [one_line(f"{fault}; {more} not used", {}) for fault in self.faults[:1]]


def run_of(model: str) -> Path | None:
    """The config.resolved.json of the run that a folder is or belongs to; None if there is no run."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    parent = folder.resolve().parent
    # The path as it was written, if it is the same place.
    places = (folder, folder.parent if folder.parent.resolve() == parent else parent)
    return next((place / RESOLVED for place in places if (place / RESOLVED).is_file()), None)


def read_recorded(file: Path) -> Recorded:
    """The settings in a run's config.resolved.json.

    Raises UserError if it cannot be read as a JSON object, and for a link or anything else but a file.
    """
    found, values = Settings(label=str(file), folder=Path()), {}
    for name, table in parse(file, str(file), open_file).items():
        if name in SECTIONS:
            values[name] = section_values(name, table, found)
        else:
            found.fault((name,), "unknown key")
    return Recorded(file, values, tuple(found.problems))


def recorded_in(folder: Path) -> Recorded:
    """The settings of the run in a folder; none if they cannot be read."""
    try:
        return read_recorded(folder / RESOLVED)
    except UserError:  # damaged, being replaced, or from before such files
        return Recorded(folder / RESOLVED)
