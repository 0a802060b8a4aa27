"""The config of the run that a model came from; `grpo eval` uses it if no --config is given.

The file is untrusted, like the folder. So no code that it names is run, unless --config names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runners.config.loading import Config, load_config
from runners.config.sections import CALCULATOR, REWARD_NAMES, judge_of
from runners.errors import UserError, show, spell
from runners.files.json_files import read_json
from runners.inference.tool_options import run_of

# Keys of a config that change the numbers of an evaluation.
_MEASURED: dict[str, tuple[str, ...]] = {
    "data": (
        "source", "name", "split", "eval_split", "question", "answer", "prompt", "system_prompt", "nudge",
        "chat_template_kwargs", "max_prompt_length", "on_bad_row",
    ),
    "rollout": ("stop", "max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    "reward": ("functions", "weights"),
    "env": ("factory", "tools", "max_turns", "max_tool_calls", "max_observation_tokens", "on_error"),
    "eval": ("samples", "max_new_tokens"),
}  # fmt: skip


def config_of_runs(
    models: Sequence[str], overrides: Sequence[str], note: Callable[[str], None]
) -> Config | None:
    """The config of the models' run, with `section.key=value` overrides; None if no model is from a run.

    Built-in rewards are used. `note` gets a line that names the file, and one for custom rewards, which are
    left out because they are code.

    Raises UserError if two models' runs are not measured in the same way, and if the data or the model cannot
    be read without code that the run's config names; ConfigError as `load_config` does.
    """
    files = list(dict.fromkeys(file for model in models if (file := run_of(model))))
    if not files:
        return None
    found = [_load(file, overrides, note if file == files[0] else lambda line: None) for file in files]
    for file, config in zip(files[1:], found[1:], strict=True):
        _check_same(files[0], found[0], file, config)
    note(f"data, prompts and rewards as in the run ({files[0]}); --config, --data and --set replace them")
    return found[0]


def _load(file: Path, overrides: Sequence[str], note: Callable[[str], None]) -> Config:
    content = read_json(file)
    given = {override.partition("=")[0].strip() for override in overrides}
    reward = content.get("reward", {})
    names, weights = _list(reward, "functions"), _list(reward, "weights")
    kept = [i for i, name in enumerate(names) if name in REWARD_NAMES]
    if len(kept) < len(names) and "reward.functions" not in given:
        functions = [names[i] for i in kept] or ["correctness_reward_func"]
        taken = [weights[i] for i in kept] if len(weights) == len(names) else []
        overrides = [f"reward.functions={spell(functions)}", f"reward.weights={spell(taken)}", *overrides]
        own = ", ".join(show(name) for name in names if name not in REWARD_NAMES)
        note(
            f"{file}: rewards left out, as code runs only if you name the config: {own}; --config {file} "
            "runs them"
        )
    config = load_config(str(file), overrides)
    env = config.env
    code = {
        "reward.functions": [name for name in config.reward.functions if name not in REWARD_NAMES],
        "data.transform": config.data.transform,
        "model.loader": config.model.loader,
        "env.factory": "" if env.factory == CALCULATOR else env.factory,
        "env.tools": list(env.tools),
    }
    if judges := [name for name in config.reward.functions if judge_of(name) is not None]:
        # Its table has the address to which texts and a key would be sent.
        raise UserError(
            f"{file}: {show(judges)} asks a judge, which needs you to name the config: --config {file}"
        )
    for key, named in code.items():
        if named and key not in given:
            raise UserError(
                f"{file}: {key} = {show(named)} is code, which runs only if you name the config: "
                f"--config {file}"
            )
    return config


def _list(table: Any, key: str) -> list[Any]:
    found = table.get(key) if isinstance(table, dict) else None
    return found if isinstance(found, list) else []


def _check_same(first: Path, one: Config, second: Path, other: Config) -> None:
    """Raises UserError, with the first key that differs, unless two runs are measured in the same way."""
    was, now = one.to_dict(), other.to_dict()
    for section, keys in _MEASURED.items():
        for key in keys:
            if was[section][key] != now[section][key]:
                raise UserError(
                    f"the runs differ in {section}.{key} ({show(was[section][key])} in {first}, "
                    f"{show(now[section][key])} in {second}); --config says what both models are measured by"
                )
