"""From prompts to an experience: sample completions, score them, turn rewards into advantages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import stream_key
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.data.prompts import Example, columns_of
from runners.errors import RewardError
from runners.rewards.scoring import Scorer
from runners.rewards.trl_arguments import NO_RUN, TrainerState
from runners.tokenization.text import TextDecoder


@attrs.frozen(eq=False)
class Experience:
    """One batch step's completions and what was said about them. Rows are prompt-major, as in Rollout."""

    rollout: g.Rollout
    examples: tuple[Example, ...]  # P
    texts: tuple[str, ...]  # B = P·G completions as rewards see them: the nudge in front
    values_kb: np.ndarray  # each reward function's values, NaN = no reward
    rewards_pg: np.ndarray  # combined, shaping included; NaN = no reward
    advantages_pg: mx.array
    sampled_tokens: int  # tokens drawn, those of replaced groups included
    resampled: int  # groups that dynamic sampling replaced
    problems: tuple[str, ...]  # what went wrong in scoring, a line each
    seconds: dict[str, float]  # "rollout", "reward"
    extras: dict[str, list[Any]]  # columns that rewards logged, B entries each
    logged: dict[str, list[float]]  # metrics that rewards logged
    reward_names: tuple[str, ...]  # of the rows of values_kb
    penalty_b: np.ndarray | None = None  # the length penalty that is part of rewards_pg; None: there is none


Generate = Callable[[Tree, Sequence[Example], mx.array], g.Rollout]


@attrs.frozen(eq=False)
class Collector:
    """Makes experiences; the settings of a run that sampling and scoring need."""

    generate: Generate
    scorer: Scorer
    decoder: TextDecoder
    config: Config  # checked: [loss] complete

    def collect(
        self,
        params: Tree,
        take: Callable[[int], Sequence[Example]],
        key: mx.array,
        trainer_state: TrainerState = NO_RUN,
    ) -> Experience:
        """Sample and score `batch_size` prompts with the given parameters.

        `take(n)` hands out the next n prompts; `trainer_state` is what rewards are told of the run.
        With dynamic sampling, groups without variance are replaced by fresh prompts for at most
        `max_resample` rounds; whatever is missing then is filled with the last of them, which the learner
        skips.

        Raises RewardError where a reward failed for every completion, unless reward.stop_if_all_fail is off.
        """
        wanted = self.config.optim.batch_size
        rounds = self.config.loss.max_resample if self.config.loss.dynamic_sampling else 0
        kept: list[Experience] = []
        failed: dict[int, str] | None = None  # rewards that have judged no completion of any round
        missing, spent, replaced = wanted, 0, 0
        for number in range(rounds + 1):
            part, failed_now = self._once(params, take(missing), stream_key(key, number), trainer_state)
            failed = failed_now if failed is None else {k: failed[k] for k in failed if k in failed_now}
            spent += part.sampled_tokens
            varied = _varied_groups(part.rewards_pg)
            missing -= len(varied)
            if missing == 0 or number == rounds:
                flat = [p for p in range(len(part.examples)) if p not in set(varied)]
                kept.append(_some_groups(part, sorted(varied + flat[:missing])))
                break
            replaced += missing
            if varied:
                kept.append(_some_groups(part, varied))
        if failed and self.config.reward.stop_if_all_fail:
            raise RewardError(
                f"{next(iter(failed.values()))}; it failed for every completion of this batch step: mend it "
                "and go on with --resume, or train without it by reward.stop_if_all_fail = false"
            )
        whole = _joined(kept)
        rewards_pg = mx.array(whole.rewards_pg.astype(np.float32))
        loss = self.config.loss
        assert loss.baseline is not None and loss.scale is not None  # Config.check
        advantages_pg = g.group_advantages(rewards_pg, baseline=loss.baseline, scale=loss.scale)
        mx.eval(advantages_pg)
        return attrs.evolve(whole, advantages_pg=advantages_pg, sampled_tokens=spent, resampled=replaced)

    def _once(
        self, params: Tree, examples: Sequence[Example], key: mx.array, trainer_state: TrainerState
    ) -> tuple[Experience, dict[int, str]]:
        """One round, and the rewards that failed for all of its completions."""
        started = time.perf_counter()
        rollout = self.generate(params, examples, key)
        sampled = time.perf_counter()
        completions = rollout.completions()
        size = rollout.num_generations
        nudge = self.config.data.nudge
        texts = [nudge + self.decoder.decode(tokens) for tokens in completions]
        scores = self.scorer.score(
            texts,
            [list(example.messages) for example in examples for _ in range(size)],
            columns_of(examples, size),
            completions,
            trainer_state,
        )
        penalty_b = length_penalty(self.config, rollout.lengths_b)
        rewards_pg = self._combined(scores.values_kb, penalty_b, rollout)
        experience = Experience(
            rollout=rollout,
            examples=tuple(examples),
            texts=tuple(texts),
            values_kb=scores.values_kb,
            rewards_pg=rewards_pg,
            advantages_pg=mx.zeros(rewards_pg.shape),
            sampled_tokens=sum(map(len, completions)),
            resampled=0,
            problems=tuple(scores.problems),
            seconds={"rollout": sampled - started, "reward": time.perf_counter() - sampled},
            extras=scores.extras,
            logged=scores.metrics,
            reward_names=tuple(reward.name for reward in self.scorer.rewards),
            penalty_b=None if penalty_b is None else np.array(penalty_b),
        )
        return experience, scores.failed

    def _combined(self, values_kb: np.ndarray, penalty_b: mx.array | None, rollout: g.Rollout) -> np.ndarray:
        weights = [reward.weight for reward in self.scorer.rewards]
        rewards_b = g.combine_rewards(
            mx.array(values_kb.astype(np.float32)),
            mx.array(weights, mx.float32),
            aggregate=self.config.reward.aggregate,
            group_size=rollout.num_generations,
        )
        if penalty_b is not None:
            rewards_b = rewards_b + penalty_b
        return np.array(rewards_b, np.float64).reshape(len(rollout.prompts), rollout.num_generations)


def length_penalty(config: Config, lengths_b: mx.array) -> mx.array | None:
    """What `loss.overlong` adds to the reward of completions of these lengths; None where it is off."""
    overlong = config.loss.overlong
    assert overlong is not None  # Config.check
    if overlong.buffer == 0:
        return None
    return g.overlong_penalty(lengths_b, config.rollout.max_new_tokens, overlong.buffer, overlong.penalty)


def _varied_groups(rewards_pg: np.ndarray) -> list[int]:
    """Groups in which at least two given rewards differ."""
    with np.errstate(invalid="ignore"):
        low = np.nanmin(np.where(np.isnan(rewards_pg), np.inf, rewards_pg), axis=1)
        high = np.nanmax(np.where(np.isnan(rewards_pg), -np.inf, rewards_pg), axis=1)
    return [p for p in range(len(rewards_pg)) if high[p] > low[p]]


def _some_groups(part: Experience, groups: list[int]) -> Experience:
    if len(groups) == len(part.examples):
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
    )


def _joined(parts: list[Experience]) -> Experience:
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
        penalty_b=None
        if any(part.penalty_b is None for part in parts)
        else np.concatenate([part.penalty_b for part in parts if part.penalty_b is not None]),
    )
