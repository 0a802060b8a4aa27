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
from runners.errors import RewardError, UserError
from runners.images.tower import VisionPart
from runners.ranks.ranks import Ranks
from runners.rewards.calls import NO_RUN, TrainerState
from runners.rewards.experience import (
    Experience,
    FinishedEpisodes,
    advantages_of,
    check_turn_rewards,
    is_varied,
    join_experiences,
    join_stages,
    length_penalty,
    select_groups,
)
from runners.rewards.scoring import Failed, Scorer
from runners.tokenization.text import TextDecoder

_TUPLES = ("texts", "problems", "reward_names")  # which JSON makes lists
_ELSEWHERE = ("rollout", "examples", "played")  # fields of their own
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
            raise RewardError(
                f"{broken[0]}; it failed for every completion of this batch step: fix it "
                "and continue with --resume, or set reward.stop_if_all_fail = false to train without it"
            )

    def _on_all_ranks(
        self, examples: Sequence[Example], key: mx.array, trainer_state: TrainerState
    ) -> Experience:
        """One round; each rank does its share."""
        numbers = range(self.ranks.number, len(examples), self.ranks.count)
        own = [examples[number] for number in numbers]
        size, begun = self.sampling.num_generations, self.config.rollout.first_stage
        sampling = attrs.evolve(self.sampling, num_generations=begun or size)
        part, fault = self._stage(own, numbers, sampling, key, trainer_state)
        if begun:  # all ranks sample equally often
            varied = np.flatnonzero(is_varied(part.rewards_pg)).tolist() if part else []
            again = [own[p] for p in varied], [numbers[p] for p in varied]
            sampling = attrs.evolve(sampling, num_generations=size - begun, first_generation=begun)
            rest, late = self._stage(*again, sampling, key, trainer_state)
            fault = fault or late
            if part is not None and fault is None:
                part = self._whole(part, rest, varied)
        if part is not None and self.ranks.is_alone:
            return part
        return gather_rollout(self.ranks, examples, None if fault else part, fault)

    def _stage(
        self,
        examples: Sequence[Example],
        numbers: Sequence[int],
        sampling: g.Sampling,
        key: mx.array,
        trainer_state: TrainerState,
    ) -> tuple[Experience | None, str | None]:
        """This rank's completions with their rewards, None without examples; or why a reward ends the run."""
        started = time.perf_counter()
        try:
            rollout, played = self._sampled(examples, numbers, sampling, key)
        except RewardError as error:
            if self.ranks.is_alone:
                raise
            raise UserError(str(error)) from error  # the others are within the rollout: nothing is saved
        try:
            return self._scored(examples, rollout, played, trainer_state, started) if examples else None, None
        except RewardError as error:
            if self.ranks.is_alone:
                raise
            return None, str(error)

    def _whole(self, first: Experience, rest: Experience | None, groups: Sequence[int]) -> Experience:
        """Both stages as one; the rest is of these groups."""
        size = self.sampling.num_generations
        whole = join_stages(first, rest, groups, size)
        rewards_pg = self._combined(whole.values_kb, whole.penalty_b).reshape(-1, size)
        return attrs.evolve(whole, rewards_pg=rewards_pg)

    def _combined(self, values_kb: np.ndarray, penalty_b: np.ndarray | None, size: int = 0) -> np.ndarray:
        """The rewards of completions, float64 [B], in groups of `size`, with the penalty on their lengths."""
        rewards_b = g.combine_rewards(
            mx.array(values_kb.astype(np.float32)),
            mx.array([reward.weight for reward in self.scorer.rewards], mx.float32),
            aggregate=self.config.reward.aggregate,
            group_size=size or self.sampling.num_generations,
        )
        return np.array(rewards_b if penalty_b is None else rewards_b + mx.array(penalty_b), np.float64)

    def _sampled(
        self, examples: Sequence[Example], numbers: Sequence[int], sampling: g.Sampling, key: mx.array
    ) -> tuple[g.Rollout, FinishedEpisodes | None]:
        """Completions, or conversations; `numbers` are the examples' places among those of all ranks."""
        if self.environments is None:
            requests = requests_of(examples, numbers, self.vision)
            return self.engine.generate(requests, sampling, key=key), None
        agree = functools.partial(self.ranks.any_rank, "the prompts")
        return self.environments.play(self.engine, examples, sampling, key=key, numbers=numbers, agree=agree)

    def _scored(
        self,
        examples: Sequence[Example],
        rollout: g.Rollout,
        played: FinishedEpisodes | None,
        trainer_state: TrainerState,
        started: float,
    ) -> Experience:
        """The rollout that began at `started`, with its rewards."""
        sampled, size = time.perf_counter(), rollout.num_generations
        completions = rollout.completions()
        texts = [self.config.data.nudge + self.decoder.decode(tokens) for tokens in completions]
        scores = self.scorer.score(
            texts,
            [list(example.messages) for example in examples for _ in range(size)],
            columns_of(examples, size),
            completions,
            trainer_state,
            conversations=None if played is None else played.messages,
            environments=None if played is None else played.environments,
        )
        if played is not None:
            scores.values_kb[:, [bool(fault) for fault in played.faults]] = np.nan
        if self._turn_rewards:
            scores.problems.extend(check_turn_rewards(scores, rollout))
        penalty_b = length_penalty(self.config, rollout.lengths_b)
        penalty_b = None if penalty_b is None else np.array(penalty_b)
        rewards_b = self._combined(scores.values_kb, penalty_b, size)
        rewards_pg = rewards_b.reshape(len(rollout.prompts), size)
        return Experience(
            rollout=rollout,
            examples=tuple(examples),
            texts=tuple(texts),
            values_kb=scores.values_kb,
            rewards_pg=rewards_pg,
            advantages_pg=mx.zeros(rewards_pg.shape),
            sampled_tokens=sum(map(len, completions if played is None else played.sampled)),
            problems=(*(played.problems if played else ()), *scores.problems),
            seconds={"rollout": sampled - started, "reward": time.perf_counter() - sampled},
            extras=scores.extras,
            logged=scores.metrics,
            reward_names=tuple(reward.name for reward in self.scorer.rewards),
            penalty_b=penalty_b,
            played=played,
            failed=scores.failed,
        )


def gather_rollout(
    ranks: Ranks, examples: Sequence[Example], part: Experience | None, fault: str | None
) -> Experience:
    """The whole experience of these examples of all ranks, from every rank's part; the same on all ranks.

    `part` is this rank's, None if it has no example or a `fault`: why its rewards end the run. Raises
    RewardError, on all ranks, if one rank has a fault.
    """
    messages = ranks.all_gather_object("the rollout", [part and _packed(part), fault])
    found = [message.value for message in messages]
    for rank, (_, line) in enumerate(found):
        if line:
            raise RewardError(f"{ranks.name(rank)}: {line}")
    parts = {
        rank: _unpacked(value, examples[rank :: ranks.count])
        for rank, (value, _) in enumerate(found)
        if value
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
    sampled = sum(experience.sampled_tokens for experience in experiences)
    # Environments' faults are counted over the whole batch; other lines are not repeated.
    lines = [] if whole.played is None else list(whole.played.problems)
    for each in experiences:
        counted = () if each.played is None else each.played.problems
        lines += [line for line in each.problems if line not in counted]
    problems = tuple(dict.fromkeys(lines))
    return attrs.evolve(whole, sampled_tokens=sampled, problems=problems, seconds=seconds)


def _packed(experience: Experience) -> dict[str, Any]:
    """Plain values and arrays. An environment stays on its rank: only its rewards need it."""
    played = experience.played and attrs.evolve(experience.played, environments=())
    return {
        **_fields(experience, *_ELSEWHERE),
        "rollout": _fields(experience.rollout, "images"),
        "played": played and {**_fields(played), "counted": list(map(dict, played.counted))},
        "failed": [(k, *attrs.astuple(fault)) for k, fault in experience.failed.items()],
    }


def _unpacked(value: dict[str, Any], examples: Sequence[Example]) -> Experience:
    rollout, played = value["rollout"], value["played"]
    drawn: dict[str, Any] = {
        name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in rollout.items()
    }
    drawn["prompts"] = tuple(map(tuple, rollout["prompts"]))  # `reset` may have added to the examples'
    if played is not None:
        rows = {name: tuple(played[name]) for name in ("counted", "faults", "seconds")}
        rows |= {name: tuple(map(tuple, played[name])) for name in ("messages", "sampled")}
        played = FinishedEpisodes(environments=(None,) * len(rows["faults"]), **rows)
    fields = value | {name: tuple(value[name]) for name in _TUPLES}
    fields |= {"rollout": g.Rollout(**drawn), "examples": tuple(examples), "played": played}
    fields["failed"] = {k: Failed(*fault) for k, *fault in value["failed"]}
    return Experience(**{**fields, "advantages_pg": mx.array(value["advantages_pg"])})


def _fields(value: Any, *left: str) -> dict[str, Any]:
    return {name: x for name, x in attrs.asdict(value, recurse=False).items() if name not in left}
