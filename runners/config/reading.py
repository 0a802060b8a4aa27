"""Reads a config's values: a TOML file or packaged preset, then --set. Each value keeps its origin.

Types are not checked here; `runners.config.loading` converts the merged values to the frozen
config.
"""

import json
import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from runners.config import flat_keys, rules
from runners.errors import ConfigError, did_you_mean, nearest, show

PRESET_FOLDER = Path(__file__).resolve().parents[2] / "configs"
MAX_BYTES = 1 << 17  # the packaged configs have some 2,000

KeyPath = tuple[str, ...]


@attrs.define
class Settings:
    """The values merged so far, by section, with their origins, and the errors and notices so
    far.
    """

    label: str  # the file, as messages name it
    folder: Path  # relative paths may also be relative to this folder
    values: dict[str, Any] = attrs.field(factory=dict)
    origins: dict[KeyPath, str] = attrs.field(factory=dict)  # the file or --set
    problems: list[str] = attrs.field(factory=list)
    notices: list[str] = attrs.field(factory=list)
    # names in the file, if it uses MLX-GRPO's keys
    flat_names: dict[KeyPath, str] = attrs.field(factory=dict)

    def put(self, path: KeyPath, value: Any, origin: str) -> None:
        """Sets one value. A table is merged into an existing table."""
        table = self.values
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                return  # the file has a value in place of a table: reported later
        self.origins[path] = origin
        if (
            isinstance(value, Mapping)
            and isinstance(table.setdefault(path[-1], {}), dict)
            and len(path) < 3
        ):
            for key, item in value.items():
                self.put((*path, key), item, origin)
        else:
            table[path[-1]] = value

    def is_set(self, key: str) -> bool:
        """Returns whether the file or --set contains a value for `section.key`."""
        return tuple(key.split(".")) in self.origins

    def where(self, path: KeyPath) -> str:
        """Returns a key's source, and the key as it is written there, such as `train.toml:
        rollout.top_p`.
        """
        parts = (path[:length] for length in range(len(path), 0, -1))
        origin = next((self.origins[part] for part in parts if part in self.origins), self.label)
        written = self.flat_names.get(path) if origin == self.label else None
        return f"{origin}: {written or '.'.join(path)}"

    def fault(self, path: KeyPath | str, message: str) -> None:
        """Adds a message about an error at a key, such as "rollout.top_p"."""
        path = tuple(path.split(".")) if isinstance(path, str) else path
        self.problems.append(f"{self.where(path)}: {message}")


def preset_names() -> list[str]:
    """Returns the names of the packaged presets."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.toml"))


def read_settings(config: str, keys: Mapping[KeyPath, attrs.Attribute]) -> Settings:
    """Reads the values in a config file, or in the packaged preset named `config`.

    A file is TOML, or JSON if its name ends in .json, such as config.resolved.json. The file
    contains either sections or MLX-GRPO's keys. `keys` maps the paths of all keys to their fields.
    Raises ConfigError if the file does not exist or cannot be read as TOML or JSON.
    """
    path, label = _locate(config)
    settings = Settings(label=label, folder=path.parent)
    table = parse(path, label)
    sections = {known[0] for known in keys}
    flat = flat_keys.flat_table(table, sections)
    if flat is not None:
        _put_flat(settings, flat, "" if flat is table else f"{flat_keys.TABLE}.")
        return settings
    for key, value in table.items():
        if key in sections:
            settings.put((key,), value, label)
        else:
            moved = (
                "; MLX-GRPO's keys have other names in sections: docs/migrating.md; a file "
                "contains either flat keys or sections"
            )
            hint = moved if key in ("model_name", flat_keys.TABLE) else key_hint((key,), keys)
            settings.fault((key,), f"unknown key{hint}")
    return settings


def _put_flat(settings: Settings, table: Mapping[str, Any], prefix: str) -> None:
    known = {key: value for key, value in table.items() if key in flat_keys.FLAT_KEYS}
    for key in table:
        if key not in known:
            settings.fault((prefix + key,), f"unknown key{did_you_mean(key, flat_keys.FLAT_KEYS)}")
    values, notices = flat_keys.in_sections(known)
    for target, value, key in values:
        path = tuple(target.split("."))
        settings.put(path, value, settings.label)
        if key in known:
            settings.flat_names[path] = prefix + key
    settings.notices += [f"{settings.label}: {notice}" for notice in notices]


def apply_override(
    settings: Settings, override: str, keys: Mapping[KeyPath, attrs.Attribute]
) -> None:
    """Applies one `--set section.key=value`.

    The value is TOML; if the key is a string, quotes may be omitted.
    """
    key, equals, written = (part.strip() for part in override.partition("="))
    path = tuple(key.split("."))
    if not equals or not key:
        settings.problems.append(f"--set: expected section.key=value, found {override}")
    elif any(known[: len(path)] == path for known in keys):
        try:
            parsed = tomllib.loads(f"value = {written}")
        except (ValueError, RecursionError):
            parsed = {}
        value = parsed["value"] if set(parsed) == {"value"} else written
        is_text = path in keys and rules.is_text(keys[path].type)
        settings.put(path, written if is_text and not isinstance(value, str) else value, "--set")
    else:
        settings.problems.append(f"--set: {key}: unknown key{key_hint(path, keys)}")


def key_hint(path: KeyPath, keys: Collection[KeyPath]) -> str:
    """Returns a hint for an unknown key: the nearest name, in its section if there is one, or the
    known names.
    """
    sections = dict.fromkeys(known[0] for known in keys)
    inside = [known for known in keys if known[0] == path[0]]
    names = {}
    for known in [*reversed(list(keys)), *reversed(inside)]:
        names |= dict.fromkeys(known[-1:] if path[1:] else known[1:], ".".join(known))
    if not inside:
        names |= {key: flat.target for key, flat in flat_keys.FLAT_KEYS.items()}
        names |= {section: section for section in sections}
    near = nearest(path[-1], names) or nearest(path[0], [] if inside else sections)
    if near:
        return f"; did you mean {names[near]}?"
    if not inside:
        return f"; the sections are {', '.join(sections)}"
    return f"; {path[0]} contains {', '.join('.'.join(known[1:]) for known in inside)}"


def _locate(config: str) -> tuple[Path, str]:
    path = Path(os.path.expanduser(config))
    presets = preset_names()
    if config in presets and not os.path.isfile(path):
        return PRESET_FOLDER / f"{config}.toml", f"{config}.toml"
    if config and os.path.exists(path):
        return path, config
    near = nearest(Path(config).name.removesuffix(".toml"), presets)
    hint = (
        f"; did you mean the preset {near}?" if near else f"; the presets are {', '.join(presets)}"
    )
    raise ConfigError([f"{config or 'CONFIG'}: no such file or preset{hint}"])


def parse(
    path: Path, label: str, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")
) -> dict[str, Any]:
    """Parses a file's tables: as JSON if its name ends in .json, otherwise as TOML. `label` names
    the file in messages.

    Raises ConfigError, in bounded time, if the file cannot be read or is too large for a config.
    """
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        with opened(path) as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError([f"{label}: expected at most {MAX_BYTES:,} bytes, found more"])
        text = data.decode("utf-8-sig")
        table = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError([f"{label}: cannot be read: {error.strerror or error}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{label}: not {kind}: {error}"]) from error
    if not isinstance(table, dict):
        raise ConfigError([f"{label}: expected a JSON object, found {show(table)}"])
    return table
