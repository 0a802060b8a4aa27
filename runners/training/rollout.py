"""From prompts to an experience: sample completions, score them, turn rewards into advantages."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import fold_in
from runners.config.loading import Config
from runners.data.prompts import Example, columns_of
from runners.engines.engine import Engine
from runners.engines.settings import requests_of
from runners.environments.environments import Environments
from runners.errors import RewardError, UserError
from runners.images.tower import VisionPart
from runners.ranks.ranks import Ranks
from runners.rewards.experience import (
    Experience,
    is_varied,
    join_experiences,
    length_penalty,
    select_groups,
)
from runners.rewards.finished_episodes import FinishedEpisodes
from runners.rewards.scoring import Failed, Scorer
from runners.rewards.trl_arguments import NO_RUN, TrainerState
from runners.rewards.turn_rewards import advantages_of, check_turn_rewards
from runners.tokenization.text import TextDecoder
from runners.training.rank_rollout import RankExperience, gather_rollout

_PATIENCE = 3  # batch steps in a row in which a reward may be too slow


@attrs.frozen(eq=False)
class Collector:
    """Makes experiences; holds the settings for sampling and scoring."""

    engine: Engine
    sampling: g.Sampling
    scorer: Scorer
    decoder: TextDecoder
    config: Config  # checked: [loss] complete
    ranks: Ranks = attrs.field(factory=Ranks)
    environments: Environments | None = None  # they answer the model's turns
    vision: VisionPart | None = None
    # Each reward's batch steps in a row in which its calls were too slow, or ended their process.
    _ended: dict[int, int] = attrs.field(factory=dict, init=False)

    def collect(
        self,
        take: Callable[[int], Sequence[Example]],
        key: mx.array,
        trainer_state: TrainerState = NO_RUN,
    ) -> Experience:
        """Sample and score `batch_size` prompts with the engine's weights.

        `take(n)` gives the next n prompts; rewards get `trainer_state`.
        With dynamic sampling, groups without variance are replaced by new prompts for at most
        `max_resample` rounds. If groups are still missing, the last ones without variance fill the batch;
        the learner skips them.

        Raises RewardError if a reward failed for every completion, unless reward.stop_if_all_fail is off. A
        call that was too slow, or that ended its process, has to be the third in a row.
        """
        wanted = self.config.optim.batch_size
        rounds = self.config.loss.max_resample if self.config.loss.dynamic_sampling else 0
        kept: list[Experience] = []
        failed: dict[int, Failed] | None = None  # rewards that failed for every completion of every round
        missing, spent, replaced = wanted, 0, 0
        for number in range(rounds + 1):
            part, failed_now = self._on_all_ranks(take(missing), fold_in(key, number), trainer_state)
            failed = failed_now if failed is None else {k: failed[k] for k in failed if k in failed_now}
            spent += part.sampled_tokens
            varied = np.flatnonzero(is_varied(part.rewards_pg)).tolist()
            missing -= len(varied)
            if missing == 0 or number == rounds:
                flat = [p for p in range(len(part.examples)) if p not in set(varied)]
                kept.append(select_groups(part, sorted(varied + flat[:missing])))
                break
            replaced += missing
            if varied:
                kept.append(select_groups(part, varied))
        self._check_failed(failed or {})
        whole = join_experiences(kept)
        advantages_pg = advantages_of(whole, self.config.loss, with_turn_rewards=self._turn_rewards)
        mx.eval(advantages_pg)
        return attrs.evolve(whole, advantages_pg=advantages_pg, sampled_tokens=spent, resampled=replaced)

    @property
    def _turn_rewards(self) -> bool:
        """Whether the last reward is the sum of those of the turns."""
        return self.environments is not None and self.environments.turn_reward is not None

    def _check_failed(self, failed: dict[int, Failed]) -> None:
        """Raises RewardError for a reward that failed for every completion of a batch step."""
        ended = {k: self._ended.get(k, 0) + 1 for k, fault in failed.items() if fault.ended}
        self._ended.clear()
        self._ended.update(ended)
        broken = [fault.line for k, fault in failed.items() if ended.get(k, _PATIENCE) >= _PATIENCE]
        if broken and self.config.reward.stop_if_all_fail:
            raise RewardError(
                f"{broken[0]}; it failed for every completion of this batch step: fix it "
                "and continue with --resume, or set reward.stop_if_all_fail = false to train without it"
            )

    def _on_all_ranks(
        self, examples: Sequence[Example], key: mx.array, trainer_state: TrainerState
    ) -> RankExperience:
        """One round, and the rewards that failed for all its completions; each rank does its share."""
        numbers = range(self.ranks.number, len(examples), self.ranks.count)
        own, part, fault = [examples[number] for number in numbers], None, None
        started = time.perf_counter()
        try:
            rollout, played = self._sampled(own, numbers, key)
        except RewardError as error:
            if self.ranks.is_alone:
                raise
            raise UserError(str(error)) from error  # the others are within the rollout: nothing is saved
        if own:
            try:
                part = self._scored(own, rollout, played, trainer_state, started)
            except RewardError as error:
                if self.ranks.is_alone:
                    raise
                fault = str(error)
        if part is not None and self.ranks.is_alone:
            return part
        return gather_rollout(self.ranks, examples, part, fault)

    def _sampled(
        self, examples: Sequence[Example], numbers: Sequence[int], key: mx.array
    ) -> tuple[g.Rollout, FinishedEpisodes | None]:
        """Completions, or conversations; `numbers` are the examples' places among those of all ranks."""
        if self.environments is None:
            requests = requests_of(examples, numbers, self.vision)
            return self.engine.generate(requests, self.sampling, key=key), None
        agree = functools.partial(self.ranks.any_rank, "the prompts")
        return self.environments.play(
            self.engine, examples, self.sampling, key=key, numbers=numbers, agree=agree
        )

    def _scored(
        self,
        examples: Sequence[Example],
        rollout: g.Rollout,
        played: FinishedEpisodes | None,
        trainer_state: TrainerState,
        started: float,
    ) -> RankExperience:
        """The rollout that began at `started`, with its rewards; and those that failed for all of it."""
        sampled, size = time.perf_counter(), rollout.num_generations
        completions = rollout.completions()
        texts = [self.config.data.nudge + self.decoder.decode(tokens) for tokens in completions]
        scores = self.scorer.score(
            texts,
            [list(example.messages) for example in examples for _ in range(size)],
            columns_of(examples, size),
            completions,
            trainer_state,
            group_size=size,
            conversations=None if played is None else played.messages,
            environments=None if played is None else played.environments,
        )
        if played is not None:
            scores.values_kb[:, [bool(fault) for fault in played.faults]] = np.nan
        if self._turn_rewards:
            scores.problems.extend(check_turn_rewards(scores, rollout))
        rewards_b = g.combine_rewards(
            mx.array(scores.values_kb.astype(np.float32)),
            mx.array([reward.weight for reward in self.scorer.rewards], mx.float32),
            aggregate=self.config.reward.aggregate,
            group_size=size,
        )
        penalty_b = length_penalty(self.config, rollout.lengths_b)
        if penalty_b is not None:
            rewards_b = rewards_b + penalty_b
        rewards_pg = np.array(rewards_b, np.float64).reshape(len(rollout.prompts), size)
        experience = Experience(
            rollout=rollout,
            examples=tuple(examples),
            texts=tuple(texts),
            values_kb=scores.values_kb,
            rewards_pg=rewards_pg,
            advantages_pg=mx.zeros(rewards_pg.shape),
            sampled_tokens=sum(map(len, completions if played is None else played.sampled)),
            resampled=0,
            problems=(*(played.problems if played else ()), *scores.problems),
            seconds={"rollout": sampled - started, "reward": time.perf_counter() - sampled},
            extras=scores.extras,
            logged=scores.metrics,
            reward_names=tuple(reward.name for reward in self.scorer.rewards),
            penalty_b=None if penalty_b is None else np.array(penalty_b),
            played=played,
        )
        return experience, scores.failed
