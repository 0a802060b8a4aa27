"""Reads a config's values: a TOML file or packaged preset, then --set. Each value keeps its origin.

Types are not checked here; `runners.config.loading` turns the merged values into the frozen config.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """The values merged so far, by section, with their origins; the faults and notices so far."""

    label: str  # the file, as messages name it
    folder: Path  # what relative paths may also refer to
    values: dict[str, Any] = attrs.field(factory=dict)
    origins: dict[KeyPath, str] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    notices: list[str] = attrs.field(factory=list)

    def put(self, path: KeyPath, value: Any, origin: str) -> None:
        """Set one value; a table is merged into an existing table."""
        table = self.values
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                return  # the file has a value in place of a table: reported with the section
        self.origins[path] = origin
        if isinstance(value, Mapping) and isinstance(table.setdefault(path[-1], {}), dict) and len(path) < 3:
            for key, item in value.items():
                self.put((*path, key), item, f"{origin}.{key}")
        else:
            table[path[-1]] = value

    def where(self, path: KeyPath) -> str:
        """The source and the key as it was written there, such as `train.toml: rollout.top_p`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return ".".join([self.origins[path[:length]], *path[length:]])
        return f"{self.label}: {'.'.join(path)}"

    def fault(self, path: KeyPath, message: str) -> None:
        """Adds the line of a fault."""
        self.problems.append(f"{self.where(path)}: {message}")


def preset_names() -> list[str]:
    """The names of the packaged presets."""
    return sorted(path.stem for path in PRESET_FOLDER.glob("*.toml"))


def read_settings(config: str, keys: Mapping[KeyPath, attrs.Attribute]) -> Settings:
    """The values of a config file, or of a packaged preset named `config`.

    A file is TOML, or JSON if its name ends in .json, such as config.resolved.json. `keys` has all keys.
    Raises ConfigError if the file does not exist or cannot be read as TOML or JSON.
    """
    sections = {known[0] for known in keys}
    path, label = _locate(config)
    table = parse(path, label)
    settings = Settings(label=label, folder=path.parent)
    flat = [key for key in table if key in flat_keys.FLAT_KEYS]
    nested = [f"[{key}]" for key in table if key in sections]
    kinds = {
        f"MLX-GRPO's keys ({_some(flat)})": flat,
        f"the table [{flat_keys.TABLE}]": flat_keys.TABLE in table,
        f"sections ({_some(nested)})": nested,
    }
    if len(found := [kind for kind, there in kinds.items() if there]) > 1:
        expected = "expected one kind of keys in a file (--set may add to either)"
        settings.problems.append(f"{label}: {expected}, found {' and '.join(found)}")
    elif flat:
        _take(settings, flat_keys.translate(table), f"{label}: ")
    else:
        for key, value in table.items():
            if key in sections:
                settings.put((key,), value, f"{label}: {key}")
            elif (key, value) == ("judge", {}):  # an older version's table, of a run without judges
                continue
            elif key != flat_keys.TABLE:
                settings.fault((key,), f"unknown key{key_hint((key,), keys)}")
            elif isinstance(value, Mapping):
                _take(settings, flat_keys.translate(value), f"{label}: {key}.")
            else:
                settings.fault((key,), f"expected a table, found {show(value)}")
    return settings


def apply_override(settings: Settings, override: str, keys: Mapping[KeyPath, attrs.Attribute]) -> None:
    """Apply one `--set section.key=value`.

    The value is TOML; if the key holds a string, quotes may be left out.
    """
    key, equals, written = (part.strip() for part in override.partition("="))
    if not equals or not key:
        settings.problems.append(f"--set: expected section.key=value, found {override}")
        return
    path = tuple(key.split("."))
    if len(path) == 1 and key in flat_keys.FLAT_KEYS:
        value = _override_value(written, type(flat_keys.FLAT_KEYS[key].default))
        optim = settings.values.get("optim")
        before = optim if isinstance(optim, Mapping) else {}
        _take(settings, flat_keys.translate({key: value}, before), "--set: ")
    elif any(known[: len(path)] == path for known in keys):
        kind = keys[path].type if path in keys else None
        settings.put(path, _override_value(written, kind), f"--set: {key}")
    else:
        settings.problems.append(f"--set: {key}: unknown key{key_hint(path, keys)}")


def key_hint(path: KeyPath, keys: Iterable[KeyPath]) -> str:
    """A hint for an unknown key: a key of that name elsewhere, the nearest spelling, or its table's keys."""
    keys = list(keys)
    elsewhere = [".".join(known) for known in keys if known[-1] == path[-1] and len(known) == 2 <= len(path)]
    if path[-1] in flat_keys.FLAT_KEYS:
        elsewhere.append(flat_keys.FLAT_KEYS[path[-1]].target)
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    parent, table = path[:-1], ".".join(path[:-1])
    if parent in keys:
        return f"; {table} is not a table"
    siblings = list(dict.fromkeys(known[len(parent)] for known in keys if known[: len(parent)] == parent))
    if siblings and parent:
        near = nearest(path[-1], siblings)
        return f"; did you mean {table}.{near}?" if near else f"; {table} takes {', '.join(siblings)}"
    sections = list(dict.fromkeys(known[0] for known in keys))
    if parent and path[0] not in sections and (near := nearest(path[0], sections)):
        return key_hint((near, *path[1:]), keys)
    known = [*(".".join(known) for known in keys), *flat_keys.FLAT_KEYS, *sections]
    return did_you_mean(".".join(path), known) or f"; the sections are {', '.join(sections)}"


def _locate(config: str) -> tuple[Path, str]:
    path, presets = Path(os.path.expanduser(config)), preset_names()
    if not config:
        raise ConfigError(["CONFIG: expected a TOML file or a preset, found an empty name"])
    if config in presets and not os.path.isfile(path):
        return PRESET_FOLDER / f"{config}.toml", f"{config}.toml"
    if os.path.isdir(path):
        raise ConfigError([f"{config}: expected a TOML file, found a folder"])
    if os.path.exists(path):
        return path, config
    near = nearest(Path(config).name.removesuffix(".toml"), presets)
    hint = f"; did you mean the preset {near}?" if near else f"; the presets are {', '.join(presets)}"
    raise ConfigError([f"{config}: no such file or preset{hint}"])


def parse(
    path: Path, label: str, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")
) -> dict[str, Any]:
    """The tables of a file, JSON if its name ends in .json, else TOML; `label` names it in messages.

    Raises ConfigError, in bounded time, if it cannot be read, or is larger than a config may be.
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _take(settings: Settings, translation: flat_keys.Translation, prefix: str) -> None:
    source = prefix.split(": ")[0]
    for name, value, key in translation.entries:
        settings.put(tuple(name.split(".")), value, f"{prefix}{key}" if key else f"{settings.label}: {name}")
    settings.problems += [f"{prefix}{key}: {reason}" for key, reason in translation.problems]
    settings.notices += [f"{source}: {notice}" for notice in translation.notices]


def _override_value(written: str, kind: Any) -> Any:
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):
        return written
    value = parsed["value"] if set(parsed) == {"value"} else written
    return written if rules.is_text(kind) and not isinstance(value, str) else value
