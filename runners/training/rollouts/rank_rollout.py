"""One batch step's completions from all ranks: each rank samples and scores its own, and all get them all.

Rank r of N has the prompts r, r + N, r + 2·N, … of the batch step. A completion's random draws depend on its
prompt's number, so that N ranks draw the same as one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.data.prompts import Example
from runners.errors import RewardError
from runners.ranks.messages import RankMessage
from runners.ranks.ranks import Ranks
from runners.rewards.experience import Experience, join_experiences, select_groups
from runners.rewards.finished_episodes import FinishedEpisodes
from runners.rewards.scoring import Failed

_ROLLOUT = ("tokens_bt", "lengths_b", "logp_bt", "finished_b", "entropy_bt", "sampled_bt", "version_b")
_ARRAYS = ("values_kb", "rewards_pg", "penalty_b")

RankExperience = tuple[Experience, dict[int, Failed]]  # and the rewards that failed for all its completions


def gather_rollout(
    ranks: Ranks, examples: Sequence[Example], part: RankExperience | None, fault: str | None
) -> RankExperience:
    """The whole experience of these examples, from every rank's part; the same on all ranks.

    Args:
        ranks: the ranks of the run.
        examples: of all ranks.
        part: this rank's, or None if it has no example or a fault.
        fault: why its rewards end the run; None: they do not.

    Raises RewardError, on all ranks, if one rank has a fault.
    """
    value, arrays = _packed(part) if part else ({}, {})
    messages = ranks.all_gather_object("the rollout", {**value, "fault": fault}, arrays)
    for rank, message in enumerate(messages):
        if message.value["fault"]:
            raise RewardError(f"{ranks.name(rank)}: {message.value['fault']}")
    parts = [
        (rank, _unpacked(message, examples[rank :: ranks.count]))
        for rank, message in enumerate(messages)
        if message.arrays
    ]
    whole = join_experiences([experience for _, (experience, _) in parts])
    places, at = {}, 0
    for rank, (experience, _) in parts:
        for number in range(len(experience.examples)):
            places[rank + number * ranks.count] = at + number
        at += len(experience.examples)
    whole = select_groups(whole, [places[number] for number in range(len(examples))])
    failed = parts[0][1][1]
    for _, (_, others) in parts[1:]:
        failed = {k: fault for k, fault in failed.items() if k in others}
    spent = {rank: found.seconds for rank, (found, _) in parts}
    longest = max(each["rollout"] for each in spent.values())
    seconds = {
        "rollout": longest,
        "reward": max(each["rollout"] + each["reward"] for each in spent.values()) - longest,
    }
    for rank in range(ranks.count):
        seconds[f"rollout_seconds/{rank}"] = spent[rank]["rollout"] if rank in spent else 0.0
    return attrs.evolve(
        whole,
        sampled_tokens=sum(found.sampled_tokens for _, (found, _) in parts),
        problems=_problems(whole, [found for _, (found, _) in parts]),
        seconds=seconds,
    ), failed


def skew_metrics(seconds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Metrics from the seconds of an update's batch steps: each rank's rollouts, and the slowest one."""
    names = sorted({name for each in seconds for name in each if name.startswith("rollout_seconds/")})
    if not names:
        return {}
    spent = {name: sum(each.get(name, 0.0) for each in seconds) for name in names}
    slowest = max(spent, key=lambda name: spent[name])
    return {
        **{f"ranks/{name}": value for name, value in spent.items()},
        "ranks/rollout_skew": max(spent.values()) - min(spent.values()),
        "ranks/slowest": int(slowest.rsplit("/", 1)[1]),
    }


def _problems(whole: Experience, parts: Sequence[Experience]) -> tuple[str, ...]:
    """The lines of all ranks, without duplicates; environments' faults are counted over the whole batch."""
    own = [] if whole.played is None else whole.played.problems
    others = [
        line
        for part in parts
        for line in part.problems
        if part.played is None or line not in part.played.problems
    ]
    return (*own, *dict.fromkeys(others))


def _packed(part: RankExperience) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    experience, failed = part
    rollout = experience.rollout
    found = {name: getattr(rollout, name) for name in _ROLLOUT} | {
        name: getattr(experience, name) for name in _ARRAYS
    }
    value = {
        "vocabulary": rollout.vocabulary,
        "num_generations": rollout.num_generations,
        "texts": list(experience.texts),
        "problems": list(experience.problems),
        "sampled_tokens": experience.sampled_tokens,
        "seconds": experience.seconds,
        "extras": {name: list(map(_plain, values)) for name, values in experience.extras.items()},
        "logged": {name: [float(value) for value in values] for name, values in experience.logged.items()},
        "reward_names": list(experience.reward_names),
        "failed": [(k, *attrs.astuple(fault)) for k, fault in failed.items()],
        "played": None if experience.played is None else _packed_played(experience.played),
        # An environment's `reset` may have added to the examples' prompts.
        "prompts": None
        if experience.played is None
        else [list(map(int, tokens)) for tokens in rollout.prompts],
    }
    return value, {name: np.array(array) for name, array in found.items() if array is not None}


def _packed_played(played: FinishedEpisodes) -> dict[str, Any]:
    """Conversations without their environments, which stay on their rank: only its rewards need them."""
    return {
        "messages": played.messages,
        "counted": list(map(dict, played.counted)),
        "faults": played.faults,
        "sampled": [list(map(int, tokens)) for tokens in played.sampled],
        "seconds": played.seconds,
    }


def _unpacked_played(value: dict[str, Any]) -> FinishedEpisodes:
    return FinishedEpisodes(
        messages=tuple(map(tuple, value["messages"])),
        environments=(None,) * len(value["messages"]),
        counted=tuple(value["counted"]),
        faults=tuple(value["faults"]),
        sampled=tuple(map(tuple, value["sampled"])),
        seconds=tuple(value["seconds"]),
    )


def _plain(value: Any) -> Any:
    """A reward's logged value; an array without dimensions becomes a number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _unpacked(message: RankMessage, examples: Sequence[Example]) -> RankExperience:
    value, arrays = message.value, message.arrays
    rows: dict[str, Any] = {name: mx.array(arrays[name]) for name in _ROLLOUT if name in arrays}
    rollout = g.Rollout(
        prompts=tuple(map(tuple, value["prompts"] or [example.tokens for example in examples])),
        num_generations=value["num_generations"],
        vocabulary=value["vocabulary"],
        **rows,
    )
    experience = Experience(
        rollout=rollout,
        examples=tuple(examples),
        texts=tuple(value["texts"]),
        values_kb=arrays["values_kb"],
        rewards_pg=arrays["rewards_pg"],
        advantages_pg=mx.zeros(arrays["rewards_pg"].shape),
        sampled_tokens=value["sampled_tokens"],
        resampled=0,
        problems=tuple(value["problems"]),
        seconds=value["seconds"],
        extras=value["extras"],
        logged=value["logged"],
        reward_names=tuple(value["reward_names"]),
        penalty_b=arrays.get("penalty_b"),
        played=None if value["played"] is None else _unpacked_played(value["played"]),
    )
    return experience, {int(k): Failed(*fault) for k, *fault in value["failed"]}
