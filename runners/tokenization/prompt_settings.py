"""How a trained model was asked: `grpo_prompt.json` in its folder, beside the files that mlx-lm reads.

A run writes the file into `final/` and into each checkpoint. generate, chat, eval, export and the model card
read it. It contains nothing about the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field

import runners
from runners.config import rules
from runners.errors import UserError, did_you_mean, show
from runners.files.json_files import read_json
from runners.files.links import check_links

PROMPT_FILE = "grpo_prompt.json"
PROMPT_FORMAT = "grpo_fn.prompt"
PROMPT_VERSION = 2
# Keys that older versions of the file lack, with their values there.
_LATER: dict[str, tuple[int, Any]] = {"chat_template_kwargs": (2, {})}
# The place of each field in a resolved config.
_SECTIONS = {
    "data": ("system_prompt", "nudge", "chat_template_kwargs"),
    "rollout": ("stop", "max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
}


@attrs.frozen(kw_only=True)
class PromptSettings:
    """How a run asked every question, ended its completions, and drew them."""

    system_prompt: str  # empty: no system message
    nudge: str  # the first words of every completion, written into the prompt
    stop: tuple[str, ...] = field(validator=rules.each_text())  # stop strings
    max_new_tokens: int = field(validator=rules.at_least(1))  # length limit of a completion
    temperature: float = field(validator=rules.above(0))
    top_p: float = field(validator=rules.fraction(zero=False))
    top_k: int = field(validator=rules.at_least(0))  # 0: off
    min_p: float = field(validator=rules.fraction(one=False))
    # Further arguments of the chat template.
    chat_template_kwargs: dict[str, bool | int | float | str] = field(
        factory=dict, hash=False, validator=rules.template_arguments()
    )

    @classmethod
    def of(cls, config: Mapping[str, Mapping[str, Any]]) -> PromptSettings:
        """From a resolved config's sections, as `Config.to_dict` gives them; KeyError if one lacks a key."""
        values = {
            name: config[section][name]
            for section, names in _SECTIONS.items()
            for name in names
            if name in config[section] or name not in _LATER  # a run from before the key
        }
        return cls(**{**values, "stop": tuple(values["stop"])})

    def sections(self) -> dict[str, dict[str, Any]]:
        """The same by section and key, in JSON's types, for `load_config`."""
        values = attrs.asdict(self) | {"stop": list(self.stop)}
        return {section: {name: values[name] for name in names} for section, names in _SECTIONS.items()}


def write_prompt(folder: Path, settings: PromptSettings) -> None:
    """Writes grpo_prompt.json into a model's folder. OSError if the disk refuses."""
    content = {"format": PROMPT_FORMAT, "version": PROMPT_VERSION, **attrs.asdict(settings)}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / PROMPT_FILE).write_text(text + "\n", encoding="utf-8")


def read_prompt(folder: Path) -> PromptSettings | None:
    """The settings in a model's folder, or in a folder of adapters; None if there are none.

    Raises UserError for a file of another format or version, a missing or unknown key, and a value that is
    impossible in a run.
    """
    file = folder / PROMPT_FILE
    if not os.path.lexists(file):
        return None
    check_links(folder, [file])
    content = read_json(file)
    if content.get("format") != PROMPT_FORMAT:
        raise UserError(f"{file}: format: found {show(content.get('format'))}, wanted {show(PROMPT_FORMAT)}")
    version = content.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= PROMPT_VERSION:
        raise UserError(
            f"{file}: found version {show(version)} of {PROMPT_FORMAT}, "
            f"wanted 1 to {PROMPT_VERSION}; grpo_fn {runners.__version__} reads no other"
        )
    fields = attrs.fields_dict(attrs.resolve_types(PromptSettings))
    values: dict[str, Any] = {}
    if unknown := sorted(content.keys() - {"format", "version"} - fields.keys()):
        raise UserError(f"{file}: unknown key {show(unknown[0])}{did_you_mean(unknown[0], fields)}")
    for name, known in fields.items():
        since, default = _LATER.get(name, (1, None))
        if version < since and name not in content:
            values[name] = default
            continue
        if name not in content:
            raise UserError(f"{file}: {name}: missing, wanted {rules.wanted(known.type)}")
        try:
            values[name] = rules.check(content[name], known)
        except rules.Mismatch as error:
            raise UserError(f"{file}: {name}: {error.reason(content[name])}") from error
    texts = {name: "".join(values[name]) for name in ("system_prompt", "nudge", "stop")}
    texts["chat_template_kwargs"] = "".join(f"{x}{y}" for x, y in values["chat_template_kwargs"].items())
    for name, text in texts.items():
        if not _is_text(text):
            raise UserError(f"{file}: {name}: holds half of a surrogate pair, which no tokenizer can read")
    return PromptSettings(**values)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
