"""Tools for a model that answers: from the command line, a config, or the model's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.config.loading import load_config
from runners.config.names import CALCULATOR, EMBEDDED
from runners.config.recorded import read_recorded, run_of
from runners.config.sections import DataConfig, EnvConfig
from runners.environments.environments import Environments, build_environments
from runners.errors import show, spell
from runners.inference.inference_model import InferenceModel
from runners.user_code.worker import Worker


def env_of(
    model: str,
    note: Callable[[str], None],
    *,
    tools: Sequence[str] = (),
    factory: str = "",
    config: str = "",
) -> tuple[EnvConfig, tuple[Path, ...]]:
    """The [env] of the command line, of a config, or of the model's run, and the folders of its files.

    If the run has tools, `note` gets a line: that they are used, or how to use them, because code runs only
    if it is named. Raises ConfigError as `load_config` does.
    """
    env, folders = EnvConfig(), (Path.cwd(),)
    if config:
        loaded = load_config(config)
        env, folders = loaded.env, loaded.folders
    elif found := run_of(model):
        env = _of_run(found, note if not (tools or factory) else lambda line: None)
    if tools or factory:
        env, folders = attrs.evolve(env, tools=tuple(tools), factory=factory), (Path.cwd(),)
    return env, folders


def _of_run(file: Path, note: Callable[[str], None]) -> EnvConfig:
    """[env] of a run's folder, which is untrusted: without code."""
    recorded = read_recorded(file)
    for notice in recorded.notices:
        note(notice)
    env = dict(recorded.values.get("env", {}))
    code = [*filter(None, [env.pop("factory", "")]), *env.pop("tools", [])]
    if code == [CALCULATOR]:
        note(f"tools as in the run ({file}): env.factory = {spell(CALCULATOR)}")
        env["factory"] = CALCULATOR
    elif code:
        reason = "its tools are left out, as code runs only if you name the config"
        note(f"{file}: {reason}: {', '.join(map(show, code))}; --config {file} runs them")
    return load_config(None, recorded={"model": {"path": EMBEDDED}, "env": env}, label=str(file)).env


def build_tools(
    model: InferenceModel,
    env: EnvConfig,
    folders: Sequence[Path],
    *,
    nudge: str,
    template_kwargs: Mapping[str, Any],
) -> Environments | None:
    """The environments of [env] for a loaded model; None if there are none."""
    data = DataConfig(nudge=nudge, chat_template_kwargs=dict(template_kwargs))
    return build_environments(env, data, model.tokenizer, model.decoder, model.eos_ids, folders, Worker())
