"""The config of the run that a model came from; `grpo eval` uses it if no --config is given.

The file is untrusted, like the folder. So no code that it names is run, unless --config names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from runners.answers.forms import FORMS
from runners.checkpoints.own_runs import is_own
from runners.config.loading import Config, load_config
from runners.config.names import CALCULATOR, REWARD_NAMES
from runners.config.recorded import read_recorded, run_of
from runners.errors import ConfigError, UserError, show

# What is taken of a run's config: no code, no address, no path but the data's.
_TAKEN: dict[str, tuple[str, ...]] = {
    "data": (
        "source", "name", "split", "eval_split", "question", "answer", "prompt", "system_prompt", "nudge",
        "chat_template_kwargs", "prompt_form", "max_prompt_length", "on_bad_row", "image", "image_folder",
        "image_max_pixels",
    ),
    "answer": ("form", "ignore_case", "ignore_spaces"),
    "rollout": ("stop", "max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    "reward": ("functions", "weights"),
    "env": (
        "factory", "tools", "max_turns", "max_tool_calls", "max_observation_tokens", "on_error", "timeout",
        "workers", "schedule",
    ),
    "eval": ("samples", "max_new_tokens"),
}  # fmt: skip
_NOT_COMPARED = ("image_folder", "timeout", "workers", "schedule")


def config_of_runs(
    models: Sequence[str], overrides: Sequence[str], note: Callable[[str], None]
) -> Config | None:
    """The config of the models' run, with `section.key=value` overrides; None if no model is from a run.

    A config that this user has trained with counts as a whole. Of any other the built-in rewards are used.
    `note` gets a line that names the file, and one for custom rewards, which are left out as they are code.

    Raises UserError if two models' runs are not measured in the same way, and if the data or the model cannot
    be read without code that the run's config names; ConfigError as `load_config` does.
    """
    files = list(dict.fromkeys(file for model in models if (file := run_of(model))))
    if not files:
        return None
    own = all(map(is_own, files))
    found = [_load(file, overrides, note if file == files[0] else lambda line: None, own) for file in files]
    for file, config in zip(files[1:], found[1:], strict=True):
        _check_same(files[0], found[0], file, config)
    note(f"data, prompts and rewards as in the run ({files[0]}); --config, --data and --set replace them")
    return found[0]


def _load(file: Path, overrides: Sequence[str], note: Callable[[str], None], own: bool) -> Config:
    if own:
        try:
            return load_config(str(file), overrides)
        except ConfigError as error:  # its files are looked up from this folder
            note(f"{error.problems[0]}: taken as a config of somebody else's")
    recorded = read_recorded(file)
    for notice in recorded.notices:
        note(notice)
    given = {override.partition("=")[0].strip() for override in overrides}
    values, naming = recorded.only(_TAKEN), f"--config {file}"
    for key in ("data.transform", "model.loader", "env.tools", "env.factory", "answer.form"):
        section, _, name = key.partition(".")
        named = recorded.get(section, name)
        is_form = key == "answer.form" and (":" not in (named or "") or named.partition(":")[0] in FORMS)
        if not named or is_form or named == CALCULATOR:
            continue
        if key not in given:
            fault = f"{key} = {show(named)} is code, which runs only if you name the config"
            raise UserError(f"{file}: {fault}: {naming}")
        values.get(section, {}).pop(name, None)
    reward = values.get("reward", {})
    names, weights = reward.get("functions", []), reward.get("weights", [])
    kept = [i for i, name in enumerate(names) if name in REWARD_NAMES]
    if len(kept) < len(names):
        reward["functions"] = [names[i] for i in kept] or [REWARD_NAMES[0]]
        reward["weights"] = [weights[i] for i in kept] if len(weights) == len(names) and kept else []
        if "reward.functions" not in given:
            left_out = ", ".join(show(name) for name in names if name not in REWARD_NAMES)
            reason = "rewards left out, as code runs only if you name the config"
            note(f"{file}: {reason}: {left_out}; {naming} runs them")
    config = load_config(None, overrides, recorded=values, label=str(file))
    if names and not kept and "reward.functions" not in given:  # none of its own is left to measure with
        config = attrs.evolve(config, reward=attrs.evolve(config.reward, functions=(), weights=()))
    return config


def _check_same(first: Path, one: Config, second: Path, other: Config) -> None:
    """Raises UserError, with the first key that differs, unless two runs are measured in the same way."""
    was, now = one.to_dict(), other.to_dict()
    for section, keys in _TAKEN.items():
        for key in keys:
            if key not in _NOT_COMPARED and was[section][key] != now[section][key]:
                raise UserError(
                    f"the runs differ in {section}.{key} ({show(was[section][key])} in {first}, "
                    f"{show(now[section][key])} in {second}); --config says what both models are measured by"
                )
