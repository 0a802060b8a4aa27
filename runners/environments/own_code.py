"""The process for the code that a config names: its rewards, tools and environments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runners.config.loading import Config
from runners.config.sections import EnvConfig
from runners.rewards.functions import Reward, resolve_rewards
from runners.rewards.functions import loading as reward_loading
from runners.user_code.host import MAIN
from runners.user_code.worker import Worker


def loading(env: EnvConfig, folders: Iterable[str | Path]) -> tuple[Any, ...]:
    """The operation for `Worker.load` that imports [env]'s factory and tools; empty if there are none."""
    if not env.factory and not env.tools:
        return ()
    return "runners.environments.instances:load", env.factory, tuple(env.tools), tuple(map(str, folders))


def start_worker(config: Config) -> Worker:
    """The process for the code that a config names. If there is some, it is started now, and imports it."""
    worker = Worker()
    for name in config.reward.functions if config.reward.timeout else ():
        if ":" in name:
            worker.preload(*reward_loading(name, config.folders))
    if tools := loading(config.env, config.folders):
        worker.preload(*tools)
        worker.submit("runners.environments.instances:prepare", mode=MAIN)
    return worker


def load_code(config: Config, worker: Worker) -> tuple[Reward, ...]:
    """The config's rewards, when all code that it names is imported: its own ones in the worker, or with
    reward.timeout = 0 in this process. UserError if some cannot be."""
    reward, place = config.reward, worker if config.reward.timeout else None
    rewards = resolve_rewards(reward.functions, reward.weights, config.folders, place, config.answer_form)
    if tools := loading(config.env, config.folders):
        worker.load(*tools)
    return rewards
