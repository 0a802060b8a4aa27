"""Gathers the ranks' parts of a rollout on every rank."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.data.prompts import Example
from runners.engines.rollouts import Talk
from runners.ranks.ranks import Ranks
from runners.rewards.experience import (
    FAULT,
    Experience,
    FinishedEpisode,
    faults_of,
    join_experiences,
    select_groups,
)
from runners.rewards.scoring import Failed


def gather_rollout(
    ranks: Ranks, examples: Sequence[Example], part: Experience | None
) -> Experience:
    """Combines all ranks' parts into the complete experience of these examples, which is the same
    on all ranks.

    `part` is this rank's part, or None if the rank has no example.
    """
    packed = ranks.all_gather_object("the rollout", part and _packed(part))
    parts = {
        rank: _unpacked(each, examples[rank :: ranks.count])
        for rank, each in enumerate(packed)
        if each
    }
    # Example number of each group in the joined parts.
    numbers = list(chain.from_iterable(range(rank, len(examples), ranks.count) for rank in parts))
    whole = select_groups(join_experiences(list(parts.values())), np.argsort(numbers).tolist())
    sampling = [
        parts[rank].seconds["rollout"] if rank in parts else 0.0 for rank in range(ranks.count)
    ]
    scored = max(each.seconds["rollout"] + each.seconds["reward"] for each in parts.values())
    # Faults in environments are counted over the whole batch; other lines are not repeated.
    others = [line for line in whole.problems if not line.startswith(FAULT)]
    return attrs.evolve(
        whole,
        sampled_tokens=sum(each.sampled_tokens for each in parts.values()),
        problems=dict.fromkeys([*faults_of(whole.played or ()), *others]),
        seconds={
            "rollout": max(sampling),
            "reward": scored - max(sampling),
            **{f"rollout_seconds/{rank}": each for rank, each in enumerate(sampling)},
        },
    )


def _packed(experience: Experience) -> dict[str, Any]:
    """Converts an experience to plain values and arrays. Environments are not sent to other ranks,
    because only their own rank's rewards need them.
    """
    return {
        **_fields(experience, "examples"),
        "rollout": _fields(experience.rollout, "images"),
        "played": experience.played
        and [
            _fields(each, "environment", "earlier")
            | {"earlier": [attrs.asdict(talk) for talk in each.earlier]}
            for each in experience.played
        ],
        "failed": [(name, *attrs.astuple(fault)) for name, fault in experience.failed.items()],
    }


def _unpacked(value: dict[str, Any], examples: Sequence[Example]) -> Experience:
    """Restores an experience from the result of `_packed`, in which tuples have become lists and
    arrays have become NumPy arrays.
    """
    rollout, played = value["rollout"], value["played"]
    drawn: dict[str, Any] = {
        name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in rollout.items()
    }
    # `reset` may have extended the examples' prompts
    drawn["prompts"] = tuple(map(tuple, rollout["prompts"]))
    return Experience(
        **value
        | {
            "rollout": g.Rollout(**drawn),
            "examples": tuple(examples),
            "advantages_pg": mx.array(value["advantages_pg"]),
            "played": played and [_unpacked_episode(each) for each in played],
            "failed": {name: Failed(line, ended) for name, line, ended in value["failed"]},
        }
    )


def _unpacked_episode(value: dict[str, Any]) -> FinishedEpisode:
    earlier = [Talk(**talk | {"prompt": tuple(talk["prompt"])}) for talk in value["earlier"]]
    return FinishedEpisode(**value | {"environment": None, "earlier": earlier})


def _fields(value: Any, *left: str) -> dict[str, Any]:
    return {name: x for name, x in attrs.asdict(value, recurse=False).items() if name not in left}
