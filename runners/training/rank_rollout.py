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

RankExperience = tuple[Experience, dict[int, Failed]]  # and the rewards that failed for all its completions
_TEXTS = ("texts", "problems", "reward_names")  # tuples, which JSON makes lists


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
    value, arrays = _packed(*part) if part else ({}, {})
    messages = ranks.all_gather_object("the rollout", {**value, "fault": fault}, arrays)
    for rank, message in enumerate(messages):
        if message.value["fault"]:
            raise RewardError(f"{ranks.name(rank)}: {message.value['fault']}")
    parts = {
        rank: _unpacked(message, examples[rank :: ranks.count])
        for rank, message in enumerate(messages)
        if message.arrays
    }
    experiences = [experience for experience, _ in parts.values()]
    # Where each example's group is among those of the parts, one after the other.
    numbers = [number for rank in parts for number in range(rank, len(examples), ranks.count)]
    whole = select_groups(join_experiences(experiences), np.argsort(numbers).tolist())
    failed = [faults for _, faults in parts.values()]
    spent = {rank: experience.seconds for rank, (experience, _) in parts.items()}
    longest = max(each["rollout"] for each in spent.values())
    scored = max(each["rollout"] + each["reward"] for each in spent.values())
    seconds = {"rollout": longest, "reward": scored - longest}
    for rank in range(ranks.count):
        seconds[f"rollout_seconds/{rank}"] = spent[rank]["rollout"] if rank in spent else 0.0
    sampled = sum(experience.sampled_tokens for experience in experiences)
    whole = attrs.evolve(
        whole, sampled_tokens=sampled, problems=_problems(whole, experiences), seconds=seconds
    )
    return whole, {k: fault for k, fault in failed[0].items() if all(k in faults for faults in failed)}


def _problems(whole: Experience, parts: Sequence[Experience]) -> tuple[str, ...]:
    """The lines of all ranks, without duplicates; environments' faults are counted over the whole batch."""
    lines = [] if whole.played is None else list(whole.played.problems)
    for part in parts:
        counted = () if part.played is None else part.played.problems
        lines += [line for line in part.problems if line not in counted]
    return tuple(dict.fromkeys(lines))


def _packed(
    experience: Experience, failed: dict[int, Failed]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Arrays, and the rest as JSON has it. An environment stays on its rank: only its rewards need it."""
    rollout, played = experience.rollout, experience.played
    value: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for owner, left in ((rollout, ("prompts", "images")), (experience, ("rollout", "examples", "played"))):
        for name, item in attrs.asdict(owner, recurse=False).items():
            if isinstance(item, mx.array | np.ndarray):
                arrays[name] = np.array(item)
            elif name not in left:
                value[name] = item
    value["extras"] = {name: list(map(_plain, column)) for name, column in experience.extras.items()}
    value["logged"] = {name: list(map(float, numbers)) for name, numbers in experience.logged.items()}
    value["failed"] = [(k, *attrs.astuple(fault)) for k, fault in failed.items()]
    value["played"] = None
    if played is not None:
        value["played"] = attrs.asdict(attrs.evolve(played, environments=()), recurse=False)
        value["played"]["counted"] = list(map(dict, played.counted))
        # An environment's `reset` may have added to the examples' prompts.
        value["prompts"] = [list(map(int, tokens)) for tokens in rollout.prompts]
    return value, arrays


def _plain(value: Any) -> Any:
    """A reward's logged value; an array without dimensions becomes a number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _unpacked(message: RankMessage, examples: Sequence[Example]) -> RankExperience:
    found = {**message.value, **message.arrays}
    failed = {int(k): Failed(*fault) for k, *fault in found.pop("failed")}
    prompts = found.pop("prompts", None) or [example.tokens for example in examples]
    rollout: dict[str, Any] = {
        field.name: mx.array(found[field.name]) if field.name in message.arrays else found[field.name]
        for field in attrs.fields(g.Rollout)
        if field.name in found
    }
    played = found["played"] and FinishedEpisodes(
        messages=tuple(map(tuple, found["played"]["messages"])),
        environments=(None,) * len(found["played"]["messages"]),
        counted=tuple(found["played"]["counted"]),
        faults=tuple(found["played"]["faults"]),
        sampled=tuple(map(tuple, found["played"]["sampled"])),
        seconds=tuple(found["played"]["seconds"]),
    )
    experience = {name: value for name, value in found.items() if name in attrs.fields_dict(Experience)}
    experience |= {name: tuple(found[name]) for name in _TEXTS}
    experience |= {"played": played, "advantages_pg": mx.array(found["advantages_pg"])}
    whole = g.Rollout(prompts=tuple(map(tuple, prompts)), **rollout)
    return Experience(rollout=whole, examples=tuple(examples), **experience), failed
