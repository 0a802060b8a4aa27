"""Supervised steps of a run: its first ones, on gold completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

import grpo_fn as g
from runners.data.prompts import Example
from runners.data.stream import PromptStream, gold_batch
from runners.images.tower import VisionPart
from runners.rewards.experience import Experience

if TYPE_CHECKING:
    from grpo_fn.policy import QuantizedRole
    from runners.training.run_state import RunState
    from runners.training.setup import Run


def gold_stream(run: Run, state: RunState) -> PromptStream:
    """The gold completions where this batch step begins."""
    return PromptStream(run.data.gold, run.config.run.seed, state.batch_step * gold_batch(run.config))


def gold_experience(examples: Sequence[Example], vision: VisionPart | None = None) -> Experience:
    """Gold completions as a batch step: groups of one with an advantage of 1, and without rewards."""
    rollout = g.given_rollout([each.tokens for each in examples], [each.gold for each in examples])
    images = vision.see(examples) if vision else None
    rows = len(examples)
    return Experience(
        rollout=rollout if images is None else attrs.evolve(rollout, images=tuple(images)),
        examples=tuple(examples),
        texts=("",) * rows,
        values_kb=np.zeros((0, rows)),
        rewards_pg=np.full((rows, 1), np.nan),
        advantages_pg=mx.ones((rows, 1)),
        sampled_tokens=sum(len(each.gold) for each in examples),
        seconds={"rollout": 0.0, "reward": 0.0},
    )


def begin_grpo(train: g.TrainState, reference: QuantizedRole | None) -> g.TrainState:
    """After the last supervised update: new moments, and a reference at these weights, rounded if it is."""
    train = attrs.evolve(train, opt_state=tree_map(mx.zeros_like, train.opt_state))
    if train.ref_params is None:
        return train
    return g.sync_ref(train, transform=reference and reference.transform)


def gold_update_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Of an update's metrics those that say something of gold completions."""
    of_samples = "reward frac_reward length_penalty ratio/ clip_ cispo_ sampling/ kl tokens_per groups/"
    return {name: value for name, value in metrics.items() if not name.startswith(tuple(of_samples.split()))}
