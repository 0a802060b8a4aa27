"""The config of the run that a model came from; `grpo eval` uses it if no --config is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runners.checkpoints.manifest import digest
from runners.config.loading import Config, load_config
from runners.config.recorded import run_of
from runners.errors import UserError, show
from runners.files.cache_folder import remembers
from runners.files.run_files import OWN_RUNS

_MEASURED = {  # the keys that decide what an evaluation measures
    "data": (
        "source", "name", "split", "eval_split", "question", "answer", "prompt", "system_prompt", "nudge",
        "chat_template_kwargs", "prompt_form", "max_prompt_length", "image", "image_max_pixels",
    ),
    "answer": ("form", "ignore_case", "ignore_spaces"),
    "rollout": ("stop", "max_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    "reward": ("functions", "weights"),
    "env": ("factory", "tools", "max_turns", "max_tool_calls", "max_observation_tokens", "on_error"),
    "eval": ("samples", "max_new_tokens"),
}  # fmt: skip


def config_of_runs(
    models: Sequence[str], overrides: Sequence[str], note: Callable[[str], None], *, has_data: bool
) -> Config | None:
    """The config of the models' run, with `section.key=value` overrides; None if no model is from a run.

    It may name code, so it has to be one that this user has trained with here. With another one the result is
    None if there is other data. `note` gets a line that names the file.

    Raises UserError for another one without data, and if two models' runs are not measured in the same way.
    """
    files = list(dict.fromkeys(file for model in models if (file := run_of(model))))
    if others := [file for file in files if not remembers(OWN_RUNS, digest(file))]:
        if has_data:
            return None
        raise UserError(
            f"{others[0]}: is of no run of yours on this machine, and may name code; --config {others[0]} "
            "measures with its data and rewards, --data with other data"
        )
    if not files:
        return None
    found = [load_config(str(file), overrides) for file in files]
    was, now = found[0].to_dict(), found[-1].to_dict()
    for section, keys in _MEASURED.items():
        for key in keys:
            if was[section].get(key) != now[section].get(key):
                raise UserError(
                    f"the runs differ in {section}.{key} ({show(was[section].get(key))} in {files[0]}, "
                    f"{show(now[section].get(key))} in {files[-1]}); --config says what both are measured by"
                )
    note(f"data, prompts and rewards as in the run ({files[0]}); --config, --data and --set replace them")
    return found[0]
