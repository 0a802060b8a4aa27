"""A scored rollout: the completions of one batch step, their rewards and their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.algorithm import has_varied_rewards
from runners.config.loading import Config
from runners.data.curriculum import Outcome
from runners.data.prompts import Example
from runners.rewards.finished_episodes import FinishedEpisodes


@attrs.frozen(eq=False)
class Experience:
    """One batch step's completions with their rewards and logs. Rows are prompt-major, as in Rollout."""

    rollout: g.Rollout
    examples: tuple[Example, ...]  # P
    texts: tuple[str, ...]  # B = P·G completions as for rewards: with the nudge in front
    values_kb: np.ndarray  # each reward function's values, NaN = no reward
    rewards_pg: np.ndarray  # combined, including shaping; NaN = no reward
    advantages_pg: mx.array  # [P,G], or of turns [P,G,S]
    sampled_tokens: int  # tokens drawn, including those of replaced groups
    resampled: int  # groups that dynamic sampling replaced
    problems: tuple[str, ...]  # faults in scoring, a line each
    seconds: dict[str, float]  # "rollout", "reward"
    extras: dict[str, list[Any]]  # columns that rewards logged, B entries each
    logged: dict[str, list[float]]  # metrics that rewards logged
    reward_names: tuple[str, ...]  # of the rows of values_kb
    outcomes: tuple[Outcome, ...] = ()  # of all groups that were drawn, including replaced ones
    played: FinishedEpisodes | None = None  # messages and counts of conversations; None: single turns
    penalty_b: np.ndarray | None = None  # the length penalty that is part of rewards_pg; None: there is none

    @property
    def sampled_lengths(self) -> np.ndarray:
        """Tokens of each completion that the model sampled."""
        if self.played is None:
            return np.array(self.rollout.lengths_b)
        return np.array([len(tokens) for tokens in self.played.sampled])

    @property
    def drawn_b(self) -> np.ndarray:
        """Whether each completion was sampled: a group without variance may have ended at its first stage."""
        lengths = np.array(self.rollout.lengths_b)
        return lengths > 0 if self.played is None else np.ones(len(lengths), bool)


def select_groups(part: Experience, groups: list[int]) -> Experience:
    """The experience with only these groups, in this order."""
    if groups == list(range(len(part.examples))):
        return part
    size = part.rollout.num_generations
    rows = [p * size + i for p in groups for i in range(size)]
    return attrs.evolve(
        part,
        rollout=g.take_groups(part.rollout, groups),
        examples=tuple(part.examples[p] for p in groups),
        texts=tuple(part.texts[row] for row in rows),
        values_kb=part.values_kb[:, rows],
        rewards_pg=part.rewards_pg[groups],
        advantages_pg=part.advantages_pg[mx.array(groups)],
        extras={column: [values[row] for row in rows] for column, values in part.extras.items()},
        penalty_b=None if part.penalty_b is None else part.penalty_b[rows],
        played=None if part.played is None else part.played.rows(rows),
    )


def join_experiences(parts: list[Experience]) -> Experience:
    """The groups of all parts as one experience."""
    if len(parts) == 1:
        return parts[0]
    return attrs.evolve(
        parts[0],
        rollout=g.join_rollouts([part.rollout for part in parts]),
        examples=tuple(example for part in parts for example in part.examples),
        texts=tuple(text for part in parts for text in part.texts),
        values_kb=np.concatenate([part.values_kb for part in parts], axis=1),
        rewards_pg=np.concatenate([part.rewards_pg for part in parts]),
        problems=tuple(problem for part in parts for problem in part.problems),
        seconds={name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds},
        extras={
            column: [value for part in parts for value in part.extras.get(column, [None] * len(part.texts))]
            for column in dict.fromkeys(column for part in parts for column in part.extras)
        },
        logged={
            name: [value for part in parts for value in part.logged.get(name, ())]
            for name in dict.fromkeys(name for part in parts for name in part.logged)
        },
        played=None
        if any(part.played is None for part in parts)
        else FinishedEpisodes.concatenated([part.played for part in parts if part.played is not None]),
        penalty_b=None
        if any(part.penalty_b is None for part in parts)
        else np.concatenate([part.penalty_b for part in parts if part.penalty_b is not None]),
    )


def join_stages(first: Experience, rest: Experience | None, groups: Sequence[int], size: int) -> Experience:
    """Groups of `size` from their first completions and, of `groups`, the rest.

    The others have empty completions without a reward in place of those that were not drawn.
    """
    begun = first.rollout.num_generations
    rows = _of_rows(first) if rest is None else join_experiences([_of_rows(first), _of_rows(rest)])
    index, drawn = [], []
    for p in range(len(first.examples)):
        more = len(first.texts) + groups.index(p) * (size - begun) if p in groups else None
        index += range(p * begun, (p + 1) * begun)
        index += [p * begun] * (size - begun) if more is None else range(more, more + size - begun)
        drawn += [True] * begun + [more is not None] * (size - begun)
    rows, drawn_b = select_groups(rows, index), mx.array(drawn)
    masked = {
        name: mx.where(drawn_b.reshape(-1, *[1] * (array.ndim - 1)), array, mx.zeros_like(array))
        for name in ("tokens_bt", "lengths_b", "logp_bt", "entropy_bt")
        if (array := getattr(rows.rollout, name)) is not None
    }
    images = rows.rollout.images
    rollout = attrs.evolve(
        rows.rollout,
        prompts=rows.rollout.prompts[::size],
        num_generations=size,
        finished_b=rows.rollout.finished_b | ~drawn_b,
        images=None if images is None else images[::size],
        **masked,
    )
    return attrs.evolve(
        rows,
        rollout=rollout,
        examples=rows.examples[::size],
        texts=tuple(text if there else "" for text, there in zip(rows.texts, drawn, strict=True)),
        values_kb=np.where(drawn, rows.values_kb, np.nan),
        rewards_pg=rows.rewards_pg.reshape(-1, size),
        advantages_pg=mx.zeros((len(first.examples), size)),
        sampled_tokens=first.sampled_tokens + (rest.sampled_tokens if rest else 0),
    )


def _of_rows(part: Experience) -> Experience:
    """The experience as groups of one completion each."""
    size, rollout = part.rollout.num_generations, part.rollout

    def repeated(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(value for value in values for _ in range(size))

    images = None if rollout.images is None else repeated(rollout.images)
    return attrs.evolve(
        part,
        rollout=attrs.evolve(rollout, prompts=repeated(rollout.prompts), num_generations=1, images=images),
        examples=repeated(part.examples),
        rewards_pg=part.rewards_pg.reshape(-1, 1),
        advantages_pg=mx.zeros((len(part.texts), 1)),
    )


def is_varied(rewards_pg: np.ndarray) -> np.ndarray:
    """Whether at least two rewards of a group differ, bool [P]: only such groups have advantages."""
    return np.array(has_varied_rewards(mx.array(rewards_pg, mx.float32)))


def length_penalty(config: Config, lengths_b: mx.array) -> mx.array | None:
    """What `loss.overlong` adds to the rewards of completions of these lengths; None if it is off."""
    overlong = config.loss.overlong
    assert overlong is not None  # Config.check
    if overlong.buffer == 0:
        return None
    return g.overlong_penalty(lengths_b, config.rollout.max_new_tokens, overlong.buffer, overlong.penalty)
