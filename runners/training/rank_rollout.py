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
from runners.ranks.ranks import Ranks
from runners.rewards.experience import Experience, FinishedEpisodes, join_experiences, select_groups
from runners.rewards.scoring import Failed

RankExperience = tuple[Experience, dict[int, Failed]]  # and the rewards that failed for all its completions
_TUPLES = ("texts", "problems", "reward_names")  # which JSON makes lists
_ELSEWHERE = ("rollout", "examples", "played")  # fields of their own


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
    messages = ranks.all_gather_object("the rollout", [part and _packed(*part), fault])
    found = [message.value for message in messages]
    for rank, (_, line) in enumerate(found):
        if line:
            raise RewardError(f"{ranks.name(rank)}: {line}")
    parts = {
        rank: _unpacked(value, examples[rank :: ranks.count])
        for rank, (value, _) in enumerate(found)
        if value
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


def _packed(experience: Experience, failed: dict[int, Failed]) -> dict[str, Any]:
    """Plain values and arrays. An environment stays on its rank: only its rewards need it."""
    played = experience.played and attrs.evolve(experience.played, environments=())
    return {
        **_fields(experience, *_ELSEWHERE),
        "rollout": _fields(experience.rollout, "images"),
        "played": played and {**_fields(played), "counted": list(map(dict, played.counted))},
        "failed": [(k, *attrs.astuple(fault)) for k, fault in failed.items()],
    }


def _unpacked(value: dict[str, Any], examples: Sequence[Example]) -> RankExperience:
    rollout, played = value["rollout"], value["played"]
    drawn: dict[str, Any] = {
        name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in rollout.items()
    }
    drawn["prompts"] = tuple(map(tuple, rollout["prompts"]))  # `reset` may have added to the examples'
    if played is not None:
        rows = {name: tuple(played[name]) for name in ("counted", "faults", "seconds")}
        rows |= {name: tuple(map(tuple, played[name])) for name in ("messages", "sampled")}
        played = FinishedEpisodes(environments=(None,) * len(rows["faults"]), **rows)
    fields: dict[str, Any] = {name: x for name, x in value.items() if name != "failed"}
    fields |= {name: tuple(value[name]) for name in _TUPLES}
    fields |= {"rollout": g.Rollout(**drawn), "examples": tuple(examples), "played": played}
    whole = Experience(**{**fields, "advantages_pg": mx.array(value["advantages_pg"])})
    return whole, {k: Failed(*fault) for k, *fault in value["failed"]}


def _fields(value: Any, *left: str) -> dict[str, Any]:
    return {name: x for name, x in attrs.asdict(value, recurse=False).items() if name not in left}
