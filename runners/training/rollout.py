"""From prompts to an experience: sample completions, score them, turn rewards into advantages.

Rank r of N samples and scores the prompts r, r + N, r + 2·N, … of a batch step, and all ranks get the whole.
A completion's random draws depend on its prompt's number, so that N ranks draw the same as one rank.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import fold_in
from runners.config.loading import Config
from runners.data.curriculum import Outcome, passed
from runners.data.prompts import Example, columns_of
from runners.engines.engine import Engine, requests_of
from runners.environments.environments import Environments
from runners.errors import RewardError
from runners.images.tower import VisionPart
from runners.ranks.ranks import Ranks
from runners.rewards.calls import NO_RUN, TrainerState
from runners.rewards.experience import (
    FAULT,
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
from runners.rewards.scoring import Failed, Scorer
from runners.tokenization.text import TextDecoder

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
        self, take: Callable[[int], Sequence[Example]], key: mx.array, trainer_state: TrainerState = NO_RUN
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
        outcomes: list[Outcome] = []
        failed: dict[int, Failed] | None = None  # rewards that failed for every completion of every round
        missing, spent, replaced = wanted, 0, 0
        for number in range(rounds + 1):
            part = self._on_all_ranks(take(missing), fold_in(key, number), trainer_state)
            failed = {k: fault for k, fault in part.failed.items() if failed is None or k in failed}
            spent += part.sampled_tokens
            outcomes += self._outcomes(part)
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
        counted = {"sampled_tokens": spent, "resampled": replaced, "outcomes": tuple(outcomes)}
        return attrs.evolve(whole, advantages_pg=advantages_pg, **counted)

    def _outcomes(self, part: Experience) -> list[Outcome]:
        """How many completions of each group passed, of those with a reward."""
        shape, at_least = part.rewards_pg.shape, self.config.data.pass_reward
        passed_b = passed(part.reward_names, part.values_kb, part.rewards_pg.reshape(-1), at_least)
        known_pg = ~np.isnan(part.rewards_pg)
        passes_p = (passed_b.reshape(shape) & known_pg).sum(axis=1).tolist()
        numbers = [example.number for example in part.examples]
        return list(zip(numbers, passes_p, known_pg.sum(axis=1).tolist(), strict=True))

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
            error = RewardError(
                f"{broken[0]}; it failed for every completion of this batch step: fix it "
                "and continue with --resume, or set reward.stop_if_all_fail = false to train without it"
            )
            error.on_all_ranks = True
            raise error

    def _on_all_ranks(
        self, examples: Sequence[Example], key: mx.array, trainer_state: TrainerState
    ) -> Experience:
        """One round; each rank does its share."""
        numbers = range(self.ranks.number, len(examples), self.ranks.count)
        own = [examples[number] for number in numbers]
        size, begun = self.sampling.num_generations, self.config.rollout.first_stage
        sampling = attrs.evolve(self.sampling, num_generations=begun or size)
        part = self._scored(own, numbers, sampling, key, trainer_state)
        if begun:  # all ranks sample equally often
            varied = np.flatnonzero(is_varied(part.rewards_pg)).tolist() if part else []
            again = [own[p] for p in varied], [numbers[p] for p in varied]
            sampling = attrs.evolve(sampling, num_generations=size - begun, first_generation=begun)
            rest = self._scored(*again, sampling, key, trainer_state)
            if part is not None:
                whole = join_stages(part, rest, varied, size)
                rewards_pg = self._combined(whole.values_kb, whole.penalty_b, size)
                part = attrs.evolve(whole, rewards_pg=rewards_pg)
        return part if part and self.ranks.is_alone else gather_rollout(self.ranks, examples, part)

    def _scored(
        self,
        examples: Sequence[Example],
        numbers: Sequence[int],
        sampling: g.Sampling,
        key: mx.array,
        trainer_state: TrainerState,
    ) -> Experience | None:
        """This rank's completions, or conversations, with their rewards; None without examples.

        `numbers` are the examples' places among those of all ranks.
        """
        started, played, size = time.perf_counter(), None, sampling.num_generations
        if self.environments is None:
            rollout = self.engine.generate(requests_of(examples, numbers, self.vision), sampling, key=key)
        else:
            how = {"numbers": numbers, "agree": functools.partial(self.ranks.any_rank, "the prompts")}
            rollout, played = self.environments.play(self.engine, examples, sampling, key=key, **how)
        if not examples:
            return None
        sampled, completions = time.perf_counter(), rollout.completions()
        said = [self.config.data.nudge + self.decoder.decode(tokens) for tokens in completions]
        texts = [examples[row // size].opening + text for row, text in enumerate(said)]
        scores = self.scorer.score(
            texts,
            [list(example.messages) for example in examples for _ in range(size)],
            columns_of(examples, size),
            completions,
            trainer_state,
            conversations=None if played is None else [each.messages for each in played],
            environments=None if played is None else [each.environment for each in played],
        )
        if played is not None:
            scores.values_kb[:, [bool(each.fault) for each in played]] = np.nan
        if self._turn_rewards:
            scores.problems.extend(check_turn_rewards(scores, rollout))
        form = self.config.answer_form
        penalty_b = length_penalty(self.config, rollout.lengths_b)
        penalty_b = None if penalty_b is None else np.array(penalty_b)
        rewards_pg = self._combined(scores.values_kb, penalty_b, size)
        return Experience(
            rollout=rollout,
            examples=tuple(examples),
            texts=tuple(texts),
            values_kb=scores.values_kb,
            rewards_pg=rewards_pg,
            advantages_pg=mx.zeros(rewards_pg.shape),
            sampled_tokens=sum(map(len, [each.sampled for each in played] if played else completions)),
            problems=(*faults_of(played or ()), *scores.problems, *(form.doubts(texts) if form else ())),
            seconds={"rollout": sampled - started, "reward": time.perf_counter() - sampled},
            extras=scores.extras,
            logged=scores.metrics,
            reward_names=tuple(reward.name for reward in self.scorer.rewards),
            penalty_b=penalty_b,
            played=played,
            failed=scores.failed,
        )

    def _combined(self, values_kb: np.ndarray, penalty_b: np.ndarray | None, size: int) -> np.ndarray:
        """The rewards of completions in groups of `size`, float64 [P,G], with the length penalty."""
        rewards_b = g.combine_rewards(
            mx.array(values_kb.astype(np.float32)),
            mx.array([reward.weight for reward in self.scorer.rewards], mx.float32),
            aggregate=self.config.reward.aggregate,
            group_size=size,
        )
        rewards_b = rewards_b if penalty_b is None else rewards_b + mx.array(penalty_b)
        return np.array(rewards_b, np.float64).reshape(-1, size)


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


def gather_rollout(ranks: Ranks, examples: Sequence[Example], part: Experience | None) -> Experience:
    """The whole experience of these examples of all ranks, from every rank's part; the same on all ranks.

    `part` is this rank's, None if it has no example.
    """
    messages = ranks.all_gather_object("the rollout", part and _packed(part))
    parts = {
        rank: _unpacked(message.value, examples[rank :: ranks.count])
        for rank, message in enumerate(messages)
        if message.value
    }
    experiences = list(parts.values())
    # Where each example's group is among those of the parts, one after the other.
    numbers = [number for rank in parts for number in range(rank, len(examples), ranks.count)]
    whole = select_groups(join_experiences(experiences), np.argsort(numbers).tolist())
    spent = {rank: experience.seconds for rank, experience in parts.items()}
    longest = max(each["rollout"] for each in spent.values())
    scored = max(each["rollout"] + each["reward"] for each in spent.values())
    seconds = {"rollout": longest, "reward": scored - longest}
    for rank in range(ranks.count):
        seconds[f"rollout_seconds/{rank}"] = spent[rank]["rollout"] if rank in spent else 0.0
    # Environments' faults are counted over the whole batch; other lines are not repeated.
    played = [each for experience in experiences for each in experience.played or ()]
    others = [line for line in whole.problems if not line.startswith(FAULT)]
    return attrs.evolve(
        whole,
        sampled_tokens=sum(experience.sampled_tokens for experience in experiences),
        problems=dict.fromkeys([*faults_of(played), *others]),
        seconds=seconds,
    )


def _packed(experience: Experience) -> dict[str, Any]:
    """Plain values and arrays. An environment stays on its rank: only its rewards need it."""
    return {
        **_fields(experience, "examples"),
        "rollout": _fields(experience.rollout, "images"),
        "played": experience.played and [_fields(each, "environment") for each in experience.played],
        "failed": [(k, *attrs.astuple(fault)) for k, fault in experience.failed.items()],
    }


def _unpacked(value: dict[str, Any], examples: Sequence[Example]) -> Experience:
    """The inverse of `_packed`, whose tuples have become lists and whose arrays are NumPy's."""
    rollout, played = value["rollout"], value["played"]
    drawn: dict[str, Any] = {
        name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in rollout.items()
    }
    drawn["prompts"] = tuple(map(tuple, rollout["prompts"]))  # `reset` may have added to the examples'
    fields = value | {
        "rollout": g.Rollout(**drawn),
        "examples": tuple(examples),
        "advantages_pg": mx.array(value["advantages_pg"]),
        "played": played and [FinishedEpisode(environment=None, **each) for each in played],
        "failed": {k: Failed(*fault) for k, *fault in value["failed"]},
    }
    return Experience(**fields)


def _fields(value: Any, *left: str) -> dict[str, Any]:
    return {name: x for name, x in attrs.asdict(value, recurse=False).items() if name not in left}
