"""Reads a config's values: a TOML file or packaged preset, then --set. Each value keeps its origin.

Types are not checked here; `runners.config.loading` turns the merged values into the frozen config.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from runners.config import flat_keys, rules
from runners.errors import ConfigError, did_you_mean, nearest, show

PRESET_FOLDER = Path(__file__).resolve().parents[2] / "configs"
MAX_BYTES, MAX_VALUES = 1 << 17, 2_000  # the packaged configs have some 2,000 and 50
# tomllib's time grows with the square of a key's parts.
_MANY_DOTS = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]+[ \t]*\.[ \t]*){16}")

KeyPath = tuple[str, ...]
ANY_NAME = "*"
"""In a key's path, stands for a table name that the user chooses."""
NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Such a name."""


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
    kinds = [f"MLX-GRPO's keys ({_some(flat)})"] if flat else []
    kinds += [f"the table [{flat_keys.TABLE}]"] if flat_keys.TABLE in table else []
    kinds += [f"sections ({_some(nested)})"] if nested else []
    if len(kinds) > 1:
        settings.problems.append(
            f"{label}: expected one kind of keys in a file (--set may add to either), found "
            f"{' and '.join(kinds)}"
        )
        return settings
    if flat:
        _take(settings, flat_keys.translate(table, complete=True), f"{label}: ")
        return settings
    for key, value in table.items():
        if key in sections:
            settings.put((key,), value, f"{label}: {key}")
        elif key != flat_keys.TABLE:
            settings.problems.append(f"{label}: {key}: unknown key{key_hint((key,), keys)}")
        elif not isinstance(value, Mapping):
            settings.problems.append(f"{label}: {key}: expected a table, found {show(value)}")
        else:
            _take(settings, flat_keys.translate(value, complete=True), f"{label}: {key}.")
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
    listed = as_listed(path, keys)
    if len(path) == 1 and key in flat_keys.FLAT_KEYS:
        value = _override_value(written, flat_keys.FLAT_KEYS[key].kind)
        translation = flat_keys.translate({key: value}, complete=False, sections=settings.values)
        _take(settings, translation, "--set: ")
    elif any(known[: len(path)] == listed for known in keys):
        kind = keys[listed].type if listed in keys else None
        settings.put(path, _override_value(written, kind), f"--set: {key}")
    else:
        settings.problems.append(f"--set: {key}: unknown key{key_hint(path, keys)}")


def as_listed(path: KeyPath, keys: Iterable[KeyPath]) -> KeyPath:
    """A key's path as in `keys`: with `ANY_NAME` in place of a table's name."""
    if len(path) > 1 and any(known[:2] == (path[0], ANY_NAME) for known in keys):
        return path[0], ANY_NAME, *path[2:]
    return path


def key_hint(path: KeyPath, keys: Iterable[KeyPath]) -> str:
    """A hint for an unknown key: a key of that name elsewhere, the nearest spelling, or its table's keys."""
    keys = list(keys)
    elsewhere = [known for known in keys if known[-1] == path[-1] and len(known) == 2 <= len(path)]
    if path[-1] in flat_keys.FLAT_KEYS:
        elsewhere.append(flat_keys.FLAT_KEYS[path[-1]].target)
    if elsewhere:
        return f"; did you mean {'.'.join(elsewhere[0])}?"
    parent, table = as_listed(path, keys)[:-1], ".".join(path[:-1])
    if parent in keys:
        return f"; {table} is not a table"
    siblings = {known[len(parent)]: None for known in keys if known[: len(parent)] == parent}
    near = nearest(path[-1], siblings)
    if siblings and parent:
        return f"; did you mean {table}.{near}?" if near else f"; {table} takes {', '.join(siblings)}"
    known = [".".join(known) for known in keys] + list(flat_keys.FLAT_KEYS) + list(siblings)
    hint = did_you_mean(".".join(path), known)
    return hint or f"; the sections are {', '.join(dict.fromkeys(known[0] for known in keys))}"


def _locate(config: str) -> tuple[Path, str]:
    path = Path(os.path.expanduser(config))
    if not config:
        raise ConfigError(["CONFIG: expected a TOML file or a preset, found an empty name"])
    if os.path.isfile(path):
        return path, config
    presets = preset_names()
    if config in presets:
        return PRESET_FOLDER / f"{config}.toml", f"{config}.toml"
    if os.path.isdir(path):
        raise ConfigError([f"{config}: expected a TOML file, found a folder"])
    if os.path.exists(path):
        return path, config  # a pipe or a device: read like a file
    near = nearest(Path(config).name.removesuffix(".toml"), presets)
    hint = f"; did you mean the preset {near}?" if near else f"; the presets are {', '.join(presets)}"
    raise ConfigError([f"{config}: no such file or preset{hint}"])


def parse(
    path: Path, label: str, opened: Callable[[Path], BinaryIO] = lambda path: path.open("rb")
) -> dict[str, Any]:
    """The tables of a file, JSON if its name ends in .json, else TOML; `label` names it in messages.

    Raises ConfigError, in bounded time, if it cannot be read, or is larger than a config may be.
    """
    try:
        with opened(path) as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{label}: cannot be read: {error.strerror or error}"]) from error
    if len(data) > MAX_BYTES:
        raise ConfigError([f"{label}: expected at most {MAX_BYTES:,} bytes, found more"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        raise ConfigError([f"{label}:{line}: expected UTF-8 text, found the byte 0x{byte:02x}"]) from error
    kind = "JSON" if path.suffix == ".json" else "TOML"
    if kind == "TOML" and (dotted := _MANY_DOTS.search(text)):
        line = text.count("\n", 0, dotted.start()) + 1
        raise ConfigError([f"{label}:{line}: expected a key of the config, found one with too many dots"])
    try:
        table = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except RecursionError:
        raise ConfigError([f"{label}: not {kind}: nested too deeply"]) from None
    except json.JSONDecodeError as error:
        raise ConfigError([f"{label}:{error.lineno}:{error.colno}: not JSON: {error.msg}"]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax_error(label, text, str(error))]) from error
    except ValueError as error:  # Python's own limit on the digits of an integer
        raise ConfigError([f"{label}: not {kind}: an integer of too many digits"]) from error
    if not isinstance(table, dict):
        raise ConfigError([f"{label}: expected a JSON object, found {show(table)}"])
    if (count := _count(table)) > MAX_VALUES:  # each could be a fault with its own line
        raise ConfigError([f"{label}: expected at most {MAX_VALUES:,} keys and values, found {count:,}"])
    return table


def _count(value: Any) -> int:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return len(items) + sum(map(_count, items))


def _syntax_error(label: str, text: str, message: str) -> str:
    reason, _, place = message.partition(" (at ")
    spot = re.match(r"line (\d+), column (\d+)", place)
    last = text.split("\n")  # without a place: at the end of the document
    line, column = (spot[1], spot[2]) if spot else (len(last), len(last[-1]) + 1)
    return f"{label}:{line}:{column}: not TOML: {reason[:1].lower()}{reason[1:]}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _take(settings: Settings, translation: flat_keys.Translation, prefix: str) -> None:
    source = prefix.split(": ")[0]
    for entry in translation.entries:
        origin = f"{prefix}{entry.key}" if entry.key else f"{settings.label}: {'.'.join(entry.path)}"
        settings.put(entry.path, entry.value, origin)
    settings.problems += [f"{prefix}{key}: {reason}" for key, reason in translation.problems]
    settings.notices += [f"{source}: {notice}" for notice in translation.notices]


def _override_value(written: str, kind: Any) -> Any:
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):
        return written
    value = parsed["value"] if set(parsed) == {"value"} else written
    return written if rules.is_text(kind) and not isinstance(value, str) else value
