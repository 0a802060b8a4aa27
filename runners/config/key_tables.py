"""The description of a key, for docs/config.md and `grpo-run --explain KEY`."""

import attrs

from runners.config import rules
from runners.config.loading import KEYS
from runners.config.reading import key_hint
from runners.errors import ConfigError, spell


def explain(name: str) -> str:
    """The description of a key such as "optim.eps", or of all keys of a section or table.

    Raises ConfigError, with the nearest spelling, for an unknown key.
    """
    asked = tuple(name.split("."))
    found = {path: field for path, field in KEYS.items() if path[: len(asked)] == asked}
    if not found:
        raise ConfigError([f"{name}: unknown key{key_hint(asked, KEYS)}"])
    parts = []
    for path, field in found.items():
        kind, default, within, meaning = (cell.replace("`", "") for cell in cells(field))
        limits = f"; {within}" if within not in ("any", "–") else ""
        parts.append(f"{'.'.join(path)}: {kind}, default {default}{limits}\n  {meaning}")
    return "\n".join(parts)


def cells(field: attrs.Attribute) -> tuple[str, str, str, str]:
    """Type, default, range and meaning of a key, in Markdown."""
    choices = rules.choices_of(field)
    within = field.metadata["range"]
    kind = "choice" if choices else rules.words(field.type).removeprefix("an ").removeprefix("a ")
    limits = ", ".join(f"`{choice}`" for choice in choices) or within
    if within and (within[0] in "<>-0123456789" or within[-1].isdigit()):
        limits = f"`{within}`"
    limits = limits or ("–" if kind == "true or false" else "any")
    default = field.default
    shown = "below" if isinstance(default, str) and "\n" in default else f"`{spell(default)}`"
    if default is attrs.NOTHING or default is None:
        shown = "required" if default is attrs.NOTHING else "preset's"
    return kind, shown, limits, field.metadata["meaning"]
