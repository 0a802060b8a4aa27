"""What a run says of itself: its head and its end on the display, and a record for each completion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runners.rollout import Experience
from runners.setup import Run


def header(run: Run) -> dict[str, Any]:
    """What is shown before the first step: name -> value."""
    config = run.config
    return {
        "run": config.run.name,
        "model": f"{config.model.path} ({run.loaded.num_parameters:,} parameters, "
        f"{run.loaded.num_trainable:,} trained, {config.model.tune})",
        "data": f"{config.data.source} ({len(run.data.train):,} to train on, "
        f"{len(run.data.evaluation):,} held out)",
        "each update": f"{config.optim.batch_size * config.optim.gradient_accumulation_steps} prompts × "
        f"{config.rollout.num_generations} completions, {config.loss.preset}",
        "writes to": str(run.folder),
    }


def summary(
    run: Run, final: Path, *, first: float | None, last: float | None, updates: int, tokens: int
) -> dict[str, Any]:
    """What is shown at the end; `first` and `last` are exact match, None where it was not measured."""
    shown: dict[str, Any] = {}
    if last is not None:
        before = f"{first:.1%} → " if first is not None else ""
        shown["exact match"] = f"{before}{last:.1%} on {len(run.data.evaluation)} held-out problems"
    shown |= {"updates": updates, "tokens sampled": f"{tokens:,}", "model": str(final)}
    if run.config.log.jsonl:
        shown["log"] = str(final.parent / "training_log.jsonl")
    return shown


def completion_records(experience: Experience, batch_step: int, update: int) -> Iterator[dict[str, Any]]:
    """One record for each completion, for completions.jsonl."""
    size = experience.rollout.num_generations
    rewards = experience.rewards_pg.reshape(-1).tolist()
    advantages = np.array(experience.advantages_pg).reshape(-1).tolist()
    lengths = np.array(experience.rollout.lengths_b).tolist()
    for row, text in enumerate(experience.texts):
        example = experience.examples[row // size]
        extra = {column: values[row] for column, values in experience.extras.items()}
        yield {
            "batch_step": batch_step,
            "update": update,
            "prompt": example.messages[-1]["content"],
            "completion": text,
            "answer": example.answer,
            "reward": rewards[row],
            "advantage": advantages[row],
            "tokens": lengths[row],
            **({"extra": extra} if extra else {}),
        }
