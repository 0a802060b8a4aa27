"""Creates an experience from prompts: samples completions, scores them, and converts rewards to
advantages.

Rank r of N samples and scores the prompts r, r + N, r + 2·N, … of a batch step, and all ranks
receive the complete result. A completion's random numbers depend on its prompt's number, so N ranks
sample the same completions as one rank.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import fold_in
from runners.config.loading import Config
from runners.data.curriculum import Outcome, passed
from runners.data.prompts import Example, columns_of, repeated
from runners.data.stream import Drawn, PromptOrder, Weighted, drawn
from runners.engines.engine import Engine, ShouldStop, Weights, never
from runners.environments.environments import Player
from runners.errors import RewardError
from runners.images.tower import VisionPart
from runners.inference.text_generation import sample, texts_of
from runners.ranks.ranks import Ranks
from runners.rewards.calls import NO_RUN, TrainerState
from runners.rewards.experience import (
    Experience,
    FinishedEpisode,
    advantages_of,
    check_turn_rewards,
    faults_of,
    is_varied,
    join_experiences,
    join_stages,
    length_penalty,
    select_groups,
)
from runners.rewards.scoring import Scorer
from runners.tokenization.text import TextDecoder
from runners.training.gathering import gather_rollout

_PATIENCE = 3  # consecutive batch steps in which a reward may be too slow
NOT_FINITE = "log-probs were not finite; the rollout was sampled again"


@attrs.frozen(eq=False, kw_only=True)
class Draw:
    """The inputs of a batch step's rollout, except the engine."""

    drawn: Drawn  # its prompts
    gold: bool = False  # use reference completions instead of sampling
    key: mx.array  # all random numbers of the rollout are derived from it
    weighted: Weighted | None = None  # how further prompts are chosen; None: in the usual order
    trainer_state: TrainerState = NO_RUN  # for rewards
    slow_rewards: Mapping[str, int] = attrs.field(factory=dict)  # see `Experience`
    # The learner's weights, as a fallback if the sampler's few-bit weights produce non-finite numbers.
    full: Weights | None = None
    weights: Weights | None = None  # the sampler's weights; None: the engine's current weights


@attrs.frozen(eq=False)
class Collector:
    """Creates experiences, using the run's settings for sampling and scoring."""

    sampling: g.Sampling
    scorer: Scorer
    decoder: TextDecoder
    config: Config  # checked; its [loss] is complete
    order: PromptOrder
    ranks: Ranks = attrs.field(factory=Ranks)
    environments: Player | None = None  # reply to the model's turns
    vision: VisionPart | None = None
    sampler: Executor | None = None  # the thread for sampling; None: the caller's thread
    should_stop: ShouldStop = never

    def collect(self, engine: Engine, draw: Draw) -> Experience:
        """Samples and scores completions of the prompts with the engine's weights.

        With dynamic sampling, groups without variance are replaced by new prompts for at most
        `max_resample` rounds. If groups are still missing after that, the last groups without
        variance fill the batch, and the learner skips them.

        Raises RewardError if a reward failed for every completion, unless reward.stop_if_all_fail
        is off. For calls that time out or end their process, RewardError is raised only at the
        third consecutive failure.
        """
        rounds = self.config.loss.max_resample if self.config.loss.dynamic_sampling else 0
        missing = len(draw.drawn.examples)
        taken = draw.drawn
        kept: list[Experience] = []
        parts: list[Experience] = []
        replaced = 0
        for number in range(rounds + 1):
            if number:
                taken = drawn(self.order, taken.position, missing, draw.weighted, taken.taken)
            key = fold_in(draw.key, number)
            mx.eval(key)  # another thread can only read an evaluated array
            part = self._on_all_ranks(engine, attrs.evolve(draw, drawn=taken, key=key))
            parts.append(part)
            varied = np.flatnonzero(is_varied(part.rewards_pg)).tolist()
            missing -= len(varied)
            if missing == 0 or number == rounds:
                flat = [p for p in range(len(part.examples)) if p not in set(varied)]
                kept.append(select_groups(part, sorted(varied + flat[:missing])))
                break
            replaced += missing
            if varied:
                kept.append(select_groups(part, varied))
        whole = join_experiences(kept)
        advantages_pg = advantages_of(whole, self.config.loss, with_turn_rewards=self._turn_rewards)
        mx.eval(advantages_pg)
        return attrs.evolve(
            whole,
            advantages_pg=advantages_pg,
            sampled_tokens=sum(part.sampled_tokens for part in parts),
            resampled=replaced,
            outcomes=tuple(chain.from_iterable(map(self._outcomes, parts))),
            position=taken.position,
            fallback=next((part.fallback for part in parts if part.fallback), None),
            slow_rewards=self._slow_rewards(parts, draw.slow_rewards),
            rows=engine.rows,
        )

    def _outcomes(self, part: Experience) -> list[Outcome]:
        """Returns, for each group, the example's number, the number of passed completions, and the
        number of completions that have a reward.
        """
        rewards_pg = part.rewards_pg
        at_least = self.config.data.pass_reward
        passed_b = passed(part.reward_names, part.values_kb, rewards_pg.reshape(-1), at_least)
        known_pg = ~np.isnan(rewards_pg)
        passes_p = (passed_b.reshape(rewards_pg.shape) & known_pg).sum(axis=1).tolist()
        numbers = [example.number for example in part.examples]
        return list(zip(numbers, passes_p, known_pg.sum(axis=1).tolist(), strict=True))

    @property
    def _turn_rewards(self) -> bool:
        """Whether the last reward is the sum of the turns' rewards."""
        return self.environments is not None and self.environments.turn_reward is not None

    def _slow_rewards(
        self, parts: Sequence[Experience], before: Mapping[str, int]
    ) -> dict[str, int]:
        """Counts, for each reward, the consecutive batch steps in which it timed out or ended its
        process for all completions.

        Raises RewardError if a reward failed for every completion of the batch step and this is not
        allowed.
        """
        failed = {
            name: fault
            for name, fault in parts[0].failed.items()
            if all(name in part.failed for part in parts)
        }
        slow = {name: before.get(name, 0) + 1 for name, fault in failed.items() if fault.ended}
        broken = [
            fault.line for name, fault in failed.items() if slow.get(name, _PATIENCE) >= _PATIENCE
        ]
        if broken and self.config.reward.stop_if_all_fail:
            error = RewardError(
                f"{broken[0]}; it failed for every completion of this batch step: fix it "
                "and continue with --resume, or set reward.stop_if_all_fail = false to train "
                "without it"
            )
            error.on_all_ranks = True
            raise error
        return slow

    def _on_all_ranks(self, engine: Engine, draw: Draw) -> Experience:
        """Runs one round of sampling and scoring, in which each rank handles its share of the
        prompts.
        """
        examples = draw.drawn.examples
        numbers = range(self.ranks.number, len(examples), self.ranks.count)
        size = self.sampling.num_generations
        begun = self.config.rollout.first_stage
        sampling = attrs.evolve(self.sampling, num_generations=begun or size)
        part = self._scored(engine, draw, numbers, sampling)
        if begun:  # all ranks run the same number of rounds
            varied = np.flatnonzero(is_varied(part.rewards_pg)).tolist() if part else []
            sampling = attrs.evolve(sampling, num_generations=size - begun, first_generation=begun)
            rest = self._scored(engine, draw, [numbers[p] for p in varied], sampling)
            if part is not None:
                whole = join_stages(part, rest, varied, size)
                rewards_pg = self._combined(whole.values_kb, whole.penalty_b, size)
                part = attrs.evolve(whole, rewards_pg=rewards_pg)
        return part if part and self.ranks.is_alone else gather_rollout(self.ranks, examples, part)

    def _sampled(
        self,
        engine: Engine,
        examples: Sequence[Example],
        numbers: Sequence[int],
        sampling: g.Sampling,
        key: mx.array,
        weights: Weights | None,
    ) -> tuple[g.Rollout | None, list[FinishedEpisode] | None]:
        """Samples completions or conversations, or returns None if there are no examples. If
        `weights` are given, the engine loads them first.
        """
        if weights is not None:
            engine.load(weights)
        if not examples:
            return None, None
        rollout, played = sample(
            engine,
            examples,
            sampling,
            key=key,
            numbers=numbers,
            environments=self.environments,
            vision=self.vision,
            should_stop=self.should_stop,
        )
        g.materialize(rollout)
        return rollout, played

    def _sampled_aside(
        self, *arguments: Any
    ) -> tuple[g.Rollout | None, list[FinishedEpisode] | None]:
        """Calls `_sampled` in the sampling thread."""
        if self.sampler is None or self.environments is not None:
            return self._sampled(*arguments)
        return self.sampler.submit(self._sampled, *arguments).result()

    def _scored(
        self,
        engine: Engine,
        draw: Draw,
        numbers: Sequence[int],
        sampling: g.Sampling,
    ) -> Experience | None:
        """Samples and scores completions or conversations for the draw's examples with these
        numbers. Returns None if there are no examples.
        """
        started = time.perf_counter()
        fallback = None
        examples = [draw.drawn.examples[number] for number in numbers]
        arguments = (engine, examples, numbers, sampling, draw.key)
        rollout, played = self._sampled_aside(*arguments, draw.weights)
        if draw.full is not None:  # few-bit weights; all ranks switch to full precision together
            bad = rollout is not None and not mx.isfinite(rollout.logp_bt).all().item()
            if self.ranks.any_rank("the sampler", bad):
                fallback = NOT_FINITE
                rollout, played = self._sampled_aside(*arguments, draw.full)
        if rollout is None:
            return None
        size = sampling.num_generations
        sampled = time.perf_counter()
        completions = rollout.completions()
        texts = texts_of(examples, completions, self.decoder, self.config.data.nudge)
        scores = self.scorer.score(
            texts,
            [list(example.messages) for example in repeated(examples, size)],
            columns_of(examples, size),
            completions,
            draw.trainer_state,
            conversations=None if played is None else [each.messages for each in played],
            environments=None if played is None else [each.environment for each in played],
            printed=None if played is None else [each.printed for each in played],
        )
        if played is not None:
            scores.values_kb[:, [bool(each.fault) for each in played]] = np.nan
        if self._turn_rewards and played is not None:
            scores.problems.extend(check_turn_rewards(scores, played))
        form = self.config.answer_form
        penalty = length_penalty(self.config, rollout.lengths_b)
        penalty_b = None if penalty is None else np.array(penalty)
        rewards_pg = self._combined(scores.values_kb, penalty_b, size)
        names = tuple(reward.name for reward in self.scorer.rewards)
        return Experience(
            rollout=rollout,
            examples=tuple(examples),
            texts=tuple(texts),
            values_kb=scores.values_kb,
            rewards_pg=rewards_pg,
            advantages_pg=mx.zeros(rewards_pg.shape),
            sampled_tokens=sum(
                map(len, [each.sampled for each in played] if played else completions)
            ),
            problems=(
                *faults_of(played or ()),
                *scores.problems,
                *(form.doubts(texts) if form else ()),
            ),
            seconds={"rollout": sampled - started, "reward": time.perf_counter() - sampled},
            extras=scores.extras,
            logged=scores.metrics,
            reward_names=names,
            penalty_b=penalty_b,
            played=played,
            failed={names[k]: fault for k, fault in scores.failed.items()},
            fallback=fallback,
        )

    def _combined(
        self, values_kb: np.ndarray, penalty_b: np.ndarray | None, size: int
    ) -> np.ndarray:
        """Combines the rewards of completions, in groups of `size`, with the length penalty.
        Returns float64 [P,G].
        """
        rewards_b = g.combine_rewards(
            mx.array(values_kb.astype(np.float32)),
            mx.array([reward.weight for reward in self.scorer.rewards], mx.float32),
            aggregate=self.config.reward.aggregate,
            group_size=size,
        )
        rewards_b = rewards_b if penalty_b is None else rewards_b + mx.array(penalty_b)
        return np.array(rewards_b, np.float64).reshape(-1, size)


def gold_experience(examples: Sequence[Example], vision: VisionPart | None = None) -> Experience:
    """Returns reference completions as a batch step: each group has one completion, with an
    advantage of 1 and no rewards.
    """
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
