"""Reads and writes a trained model's prompt format: `grpo_prompt.json` in the model's folder, next
to the files that mlx-lm reads.

A run writes the file into `final/` and into each checkpoint. generate, chat, eval, export and the
model card read it. The file contains nothing about the machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field

from runners.config import rules
from runners.config.sections import DataConfig, RolloutConfig
from runners.errors import UserError, did_you_mean, show
from runners.files.json_files import read_json, write_json

PROMPT_FILE = "grpo_prompt.json"
_FORMAT = {"format": "grpo_fn.prompt", "version": 3}


@attrs.frozen(kw_only=True)
class PromptSettings:
    """A run's prompt format, stop conditions and sampling settings: keys from [data] and
    [rollout].
    """

    system_prompt: str
    nudge: str
    stop: tuple[str, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    chat_template_kwargs: dict[str, bool | int | float | str] = field(factory=dict, hash=False)
    prompt_form: str = "chat"

    @classmethod
    def of(cls, config: Mapping[str, Mapping[str, Any]]) -> PromptSettings:
        """Creates the settings from a resolved config's sections, as returned by `Config.to_dict`.
        Raises KeyError if a key is missing.
        """
        values = {name: config[section][name] for name, (section, _) in _KEYS.items()}
        return cls(**{**values, "stop": tuple(values["stop"])})

    def sections(self) -> dict[str, dict[str, Any]]:
        """Returns the settings by section and key, in JSON's types, for `load_config`."""
        values = attrs.asdict(self) | {"stop": list(self.stop)}
        return {
            section: {name: value for name, value in values.items() if _KEYS[name][0] == section}
            for section in ("data", "rollout")
        }


_NAMES = attrs.fields_dict(PromptSettings).keys()
_KEYS: dict[str, tuple[str, attrs.Attribute]] = {
    **{key.name: ("data", key) for key in attrs.fields(DataConfig) if key.name in _NAMES},
    **{key.name: ("rollout", key) for key in attrs.fields(RolloutConfig) if key.name in _NAMES},
}
"""The config's section and key of each field."""


def write_prompt(folder: Path, settings: PromptSettings | None) -> None:
    """Writes grpo_prompt.json into a model's folder, unless the settings are None. Raises OSError
    if writing fails.
    """
    if settings is not None:
        write_json(folder / PROMPT_FILE, _FORMAT | attrs.asdict(settings), ensure_ascii=False)


def read_prompt(folder: Path) -> PromptSettings | None:
    """Reads the settings from a model folder or an adapter folder. Returns None if the folder has
    no settings.

    Raises UserError for a different format or version, a missing or unknown key, and an invalid
    value.
    """
    file = folder / PROMPT_FILE
    if not os.path.lexists(file):
        return None
    content = read_json(file)
    stated = {key: content.pop(key, None) for key in _FORMAT}
    if stated != _FORMAT:
        raise UserError(f"{file}: expected {show(_FORMAT)}, found {show(stated)}")
    unknown = sorted(content.keys() - _KEYS.keys())
    if unknown:
        raise UserError(f"{file}: unknown key {show(unknown[0])}{did_you_mean(unknown[0], _KEYS)}")
    for name, (_, known) in _KEYS.items():
        try:
            content[name] = rules.check(content.get(name), known)
        except rules.Mismatch as error:
            raise UserError(f"{file}: {name}: {error.reason(content.get(name))}") from error
    return PromptSettings(**content)
