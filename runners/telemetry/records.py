"""What a run says of itself: its head and its end on the display, and a record for each completion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runners.config.loading import Config
from runners.models.loaded_model import LoadedModel
from runners.rewards.experience import Experience
from runners.telemetry.run_statistics import combine_logged


def run_header(
    config: Config, folder: Path, loaded: LoadedModel, train: int, held_out: int
) -> dict[str, Any]:
    """What is shown before the first step of a run in `folder`: name -> value.

    `train` and `held_out` are numbers of examples.
    """
    return {
        "run": config.run.name,
        "model": f"{config.model.path} ({loaded.num_parameters:,} parameters, "
        f"{loaded.num_trainable:,} trained, {config.model.tune})",
        "data": f"{config.data.source} ({train:,} to train on, {held_out:,} held out)",
        "each update": f"{config.optim.batch_size * config.optim.gradient_accumulation_steps} prompts × "
        f"{config.rollout.num_generations} completions, {config.loss.preset}",
        **_length_penalty(config),
        "writes to": str(folder),
    }


def _length_penalty(config: Config) -> dict[str, str]:
    """What makes a completion's reward smaller than the sum of its rewards, if anything does."""
    overlong, limit = config.loss.overlong, config.rollout.max_new_tokens
    if overlong is None or not overlong.buffer:
        return {}
    free = limit - overlong.buffer
    text = f"0 up to {free:,} tokens, then down to -{overlong.penalty:g} at {limit:,} (loss.overlong)"
    return {"length penalty": text}


def run_summary(
    config: Config,
    final: Path,
    *,
    first: float | None,
    last: float | None,
    held_out: int,
    updates: int,
    tokens: int,
) -> dict[str, Any]:
    """What is shown at the end.

    `first` and `last` are exact match on `held_out` problems, None where it was not measured.
    """
    shown: dict[str, Any] = {}
    if last is not None:
        before = f"{first:.1%} → " if first is not None else ""
        shown["exact match"] = f"{before}{last:.1%} on {held_out} held-out problems"
    shown |= {"updates": updates, "tokens sampled": f"{tokens:,}", "model": str(final)}
    if config.log.jsonl:
        shown["log"] = str(final.parent / "training_log.jsonl")
    return shown


def completion_records(experience: Experience, batch_step: int, update: int) -> Iterator[dict[str, Any]]:
    """One record for each completion, for completions.jsonl; docs/rewards.md lists the keys."""
    size = experience.rollout.num_generations
    rewards = experience.rewards_pg.reshape(-1).tolist()
    advantages = np.array(experience.advantages_pg).reshape(-1).tolist()
    lengths = np.array(experience.rollout.lengths_b).tolist()
    finished = np.array(experience.rollout.finished_b).tolist()
    penalties = None if experience.penalty_b is None else experience.penalty_b.tolist()
    metrics = {name: combine_logged(name, values) for name, values in experience.logged.items()}
    for row, text in enumerate(experience.texts):
        example = experience.examples[row // size]
        values = zip(experience.reward_names, experience.values_kb[:, row].tolist(), strict=True)
        extra = {column: values[row] for column, values in experience.extras.items()}
        yield {
            "batch_step": batch_step,
            "update": update,
            "prompt": example.messages[-1]["content"],
            "completion": text,
            "answer": example.answer,
            "reward": rewards[row],
            "rewards": {name: None if math.isnan(value) else value for name, value in values},
            **({"length_penalty": penalties[row]} if penalties else {}),
            "advantage": advantages[row],
            "tokens": lengths[row],
            "finished": finished[row],
            **({"metrics": metrics} if metrics else {}),
            **({"extra": extra} if extra else {}),
        }
