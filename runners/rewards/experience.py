"""Defines scored rollouts: one batch step's completions with their conversations, rewards and
advantages.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.algorithm import BASELINES, has_varied_rewards
from runners.config.loading import Config
from runners.config.sections import LossConfig
from runners.data.curriculum import Outcome
from runners.data.messages import Message
from runners.data.prompts import Example
from runners.engines.rollouts import Talk, grouped
from runners.rewards.calls import TURN_REWARDS
from runners.rewards.scoring import Failed, Scores

FAULT = "environment: "  # prefix of the reason why an episode has no reward
COUNTS = ("turns", "calls", "failures", "timeouts", "cut")
"""The counts of a conversation; "cut" is the number of truncated results."""


@attrs.frozen
class FinishedEpisode:
    """The conversation in one row of a rollout."""

    messages: Sequence[Message]  # after the prompt, in TRL's form for rewards
    environment: int | None  # its number
    counts: Mapping[str, int]  # keys: `COUNTS`
    fault: str  # reason why the row has no reward; empty if it has one
    sampled: Sequence[int]  # the tokens that the model sampled
    seconds: float  # duration of its calls
    # The episode's rows before its last one, which is in the rollout. A new row starts when a
    # prompt does not continue the row before.
    earlier: Sequence[Talk] = ()
    printed: Mapping[str, Any] | None = None  # the last JSON object that its program printed


def faults_of(played: Sequence[FinishedEpisode]) -> list[str]:
    """Returns one message per kind of error."""
    counts = Counter(each.fault for each in played if each.fault).items()
    return [f"{FAULT}{fault}" + (f" ({n} times)" if n > 1 else "") for fault, n in counts]


@attrs.frozen(eq=False)
class Experience:
    """One batch step's completions with their rewards and logs. Rows are prompt-major, as in
    Rollout."""

    rollout: g.Rollout
    examples: tuple[Example, ...]  # P
    # B = P·G completions as rewards receive them, with the nudge.
    texts: tuple[str, ...] = attrs.field(converter=tuple)
    values_kb: np.ndarray  # each reward function's values, NaN = no reward
    rewards_pg: np.ndarray  # combined, including shaping; NaN = no reward
    advantages_pg: mx.array  # [P,G], or of turns [P,G,S]
    sampled_tokens: int  # including the tokens of replaced groups
    seconds: dict[str, float]  # "rollout", "reward"
    resampled: int = 0  # groups that dynamic sampling replaced
    # messages about faults in scoring
    problems: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    # columns logged by rewards, B entries each
    extras: dict[str, list[Any]] = attrs.field(factory=dict)
    logged: dict[str, list[float]] = attrs.field(factory=dict)  # metrics logged by rewards
    # names of the rows of values_kb
    reward_names: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    outcomes: tuple[Outcome, ...] = ()  # of all sampled groups, including replaced ones
    played: Sequence[FinishedEpisode] | None = None  # conversations; None if there is a single turn
    # the length penalty in rewards_pg; None if it is off
    penalty_b: np.ndarray | None = None
    # rewards that failed at all completions
    failed: Mapping[str, Failed] = attrs.field(factory=dict)
    position: int = 0  # number of training examples used so far, including these
    fallback: str | None = None  # reason why the sampler stopped using its quantized weights
    rows: int = 0  # number of completions that the engine decodes together from now on
    # Rewards that were too slow, or ended their process, for all completions, with the number of
    # consecutive batch steps.
    slow_rewards: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def sampled_lengths(self) -> np.ndarray:
        """Number of sampled tokens in each completion."""
        if self.played is None:
            return np.array(self.rollout.lengths_b)
        return np.array([len(each.sampled) for each in self.played])

    @property
    def drawn_b(self) -> np.ndarray:
        """Whether each completion was sampled. A group without variance may have ended after its
        first stage.
        """
        lengths = np.array(self.rollout.lengths_b)
        return lengths > 0 if self.played is None else np.ones(len(lengths), bool)


def all_rows(experience: Experience) -> tuple[g.Rollout, mx.array, mx.array]:
    """Returns every row of all episodes as a rollout in which each row has its own prompt (first
    the rollout's rows, then the earlier ones). Also returns each row's advantage, [B,1], or its
    turns' advantages, [B,1,S], and each row's prompt number, int32 [B].
    """
    rollout = experience.rollout
    size = rollout.num_generations
    prompts = tuple(chain.from_iterable([prompt] * size for prompt in rollout.prompts))
    parts = [attrs.evolve(rollout, prompts=prompts, num_generations=1)]
    episodes = [*range(len(prompts))]
    first_turns = [0] * len(prompts)  # number of each row's first turn in its episode
    for episode, each in enumerate(experience.played or ()):
        if each.earlier:
            parts.append(grouped(each.earlier, 1, with_entropy=rollout.entropy_bt is not None))
            turns_b = np.array(parts[-1].turn_numbers()).max(axis=1) + 1
            *begins, first_turns[episode] = [0, *np.cumsum(turns_b).tolist()]
            episodes += [episode] * len(begins)
            first_turns += begins
    adv_b = experience.advantages_pg.reshape(len(prompts), -1)[mx.array(episodes)]
    if experience.advantages_pg.ndim == 3:
        last = adv_b.shape[1] - 1
        turn_bs = mx.array(first_turns)[:, None] + mx.arange(last + 1)
        adv_b = mx.take_along_axis(adv_b, mx.minimum(turn_bs, last), axis=1)[:, None]
    alone = range(len(rollout.prompts), len(rollout.prompts) + len(episodes) - len(prompts))
    groups = [row // size for row in range(len(prompts))]
    return g.join_rollouts(parts), adv_b, mx.array([*groups, *alone], mx.int32)


def turn_states(experience: Experience) -> mx.array:
    """Returns `Rollout.turn_states` for whole episodes. The turns in an episode's earlier rows come
    first.
    """
    rollout = experience.rollout
    played = experience.played or ()
    if not any(each.earlier for each in played):
        return rollout.turn_states()
    whole = []
    for row, (tokens, sampled) in enumerate(
        zip(rollout.completions(), rollout.sampled(), strict=True)
    ):
        prompt = rollout.prompts[row // rollout.num_generations]
        talk = Talk(prompt, (0, 0))
        for number, each in enumerate(played[row].earlier):
            talk.give(each.prompt if number else ())
            talk.tokens += each.tokens
            talk.sampled += each.sampled
        talk.give(prompt if played[row].earlier else ())
        talk.tokens += tokens
        talk.sampled += sampled
        whole.append(talk)
    return grouped(whole, rollout.num_generations, with_entropy=False).turn_states()


def select_groups(part: Experience, groups: list[int]) -> Experience:
    """Returns the experience with only these groups, in this order."""
    if groups == list(range(len(part.examples))):
        return part
    size = part.rollout.num_generations
    rows = list(chain.from_iterable(range(p * size, (p + 1) * size) for p in groups))
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
        played=part.played and [part.played[row] for row in rows],
    )


def join_experiences(parts: list[Experience]) -> Experience:
    """Joins the groups of all parts into one experience."""
    if len(parts) == 1:
        return parts[0]
    penalties = [part.penalty_b for part in parts if part.penalty_b is not None]
    columns = dict.fromkeys(chain.from_iterable(part.extras for part in parts))
    names = dict.fromkeys(chain.from_iterable(part.logged for part in parts))
    return attrs.evolve(
        parts[0],
        rollout=g.join_rollouts([part.rollout for part in parts]),
        examples=tuple(chain.from_iterable(part.examples for part in parts)),
        texts=chain.from_iterable(part.texts for part in parts),
        values_kb=np.concatenate([part.values_kb for part in parts], axis=1),
        rewards_pg=np.concatenate([part.rewards_pg for part in parts]),
        problems=chain.from_iterable(part.problems for part in parts),
        seconds={name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds},
        extras={
            column: list(
                chain.from_iterable(
                    part.extras.get(column, [None] * len(part.texts)) for part in parts
                )
            )
            for column in columns
        },
        logged={
            name: list(chain.from_iterable(part.logged.get(name, ()) for part in parts))
            for name in names
        },
        played=parts[0].played and list(chain.from_iterable(part.played or () for part in parts)),
        penalty_b=np.concatenate(penalties) if penalties else None,
        failed={
            name: fault
            for name, fault in parts[0].failed.items()
            if all(name in part.failed for part in parts)
        },
    )


def join_stages(
    first: Experience, rest: Experience | None, groups: Sequence[int], size: int
) -> Experience:
    """Builds groups of `size` from their first completions and, for `groups`, the remaining
    completions.

    In other groups, the remaining completions are empty and have no reward.
    """
    begun = first.rollout.num_generations
    prompts = len(first.examples)
    rows = join_experiences([_regrouped(part, 1) for part in (first, rest) if part is not None])
    ends = ((0, 0), (0, size - begun))
    row_pg = np.pad(np.arange(prompts * begun).reshape(prompts, begun), ends, mode="edge")
    row_pg[groups, begun:] = np.arange(prompts * begun, len(rows.texts)).reshape(-1, size - begun)
    drawn_pg = np.arange(size) < np.full((prompts, 1), begun)
    drawn_pg[groups] = True
    drawn_b = drawn_pg.reshape(-1)
    whole = _regrouped(select_groups(rows, row_pg.reshape(-1).tolist()), size)
    return attrs.evolve(
        whole,
        rollout=attrs.evolve(
            whole.rollout, lengths_b=whole.rollout.lengths_b * mx.array(drawn_b.astype(np.int32))
        ),
        values_kb=np.where(drawn_b, whole.values_kb, np.nan),
        sampled_tokens=first.sampled_tokens + (rest.sampled_tokens if rest else 0),
    )


def _regrouped(part: Experience, size: int) -> Experience:
    """Returns the same rows in groups of another size, without advantages. Each group has its first
    row's prompt.
    """
    rollout = part.rollout
    groups = [row // rollout.num_generations for row in range(0, len(part.texts), size)]
    images = None if rollout.images is None else tuple(rollout.images[p] for p in groups)
    prompts = tuple(rollout.prompts[p] for p in groups)
    return attrs.evolve(
        part,
        rollout=attrs.evolve(rollout, prompts=prompts, num_generations=size, images=images),
        examples=tuple(part.examples[p] for p in groups),
        rewards_pg=part.rewards_pg.reshape(-1, size),
        advantages_pg=mx.zeros((len(groups), size)),
    )


def is_varied(rewards_pg: np.ndarray) -> np.ndarray:
    """Returns whether at least two rewards in a group differ, bool [P]. Only such groups have
    advantages.
    """
    return np.array(has_varied_rewards(mx.array(rewards_pg, mx.float32)))


def length_penalty(config: Config, lengths_b: mx.array) -> mx.array | None:
    """Returns the `loss.overlong` penalty for completions with these lengths, or None if the
    penalty is off.
    """
    overlong = config.loss.overlong
    assert overlong is not None  # Config.check
    if overlong.buffer == 0:
        return None
    return g.overlong_penalty(
        lengths_b, config.rollout.max_new_tokens, overlong.buffer, overlong.penalty
    )


def check_turn_rewards(scores: Scores, played: Sequence[FinishedEpisode]) -> list[str]:
    """Returns a message if there are more turn rewards than turns. Also drops the turn rewards from
    rows that lack the last reward in `scores`.
    """
    column = scores.extras.setdefault(TURN_REWARDS, [None] * scores.values_kb.shape[1])
    turns_b = [each.counts["turns"] for each in played]
    lengths = [len(row or ()) for row in column]
    excess = [row for row, turns in enumerate(turns_b) if lengths[row] > turns]
    scores.values_kb[-1, excess] = np.nan
    for row in np.flatnonzero(np.isnan(scores.values_kb[-1])):
        column[row] = None
    if not excess:
        return []
    row, *others = excess
    more = f" and {len(others)} more" if others else ""
    return [
        f"get_turn_rewards: expected at most {turns_b[row]} numbers, one for each of the model's "
        f"turns, found {lengths[row]}, at completion {row}{more}; it has no reward"
    ]


def advantages_of(experience: Experience, loss: LossConfig, *, with_turn_rewards: bool) -> mx.array:
    """Returns advantages per completion [P,G], or per turn [P,G,S] if rewards, discount or baseline
    distinguish turns.
    """
    assert loss.baseline is not None and loss.scale is not None  # Config.check
    rewards_pg = experience.rewards_pg
    by_turn = with_turn_rewards or loss.discount < 1 or BASELINES[loss.baseline].by_state
    if experience.played is None or not by_turn:
        return g.group_advantages(
            mx.array(rewards_pg.astype(np.float32)), baseline=loss.baseline, scale=loss.scale
        )
    states_pgs = turn_states(experience)
    column = experience.extras[TURN_REWARDS] if with_turn_rewards else [None] * rewards_pg.size
    others_kb = experience.values_kb[:-1] if with_turn_rewards else experience.values_kb
    rewards_bs = np.full((rewards_pg.size, states_pgs.shape[2]), np.nan)
    last_b = np.maximum((np.array(states_pgs) >= 0).sum(axis=2).reshape(-1) - 1, 0)
    for row, (own, total) in enumerate(zip(column, rewards_pg.reshape(-1), strict=True)):
        own_s = np.array(own or [], np.float64)  # None becomes NaN
        rewards_bs[row, : len(own_s)] = own_s
        if experience.penalty_b is not None or not np.isnan(others_kb[:, row]).all():
            at_end = np.nan_to_num(rewards_bs[row, last_b[row]]) + total - np.nansum(own_s)
            rewards_bs[row, last_b[row]] = at_end
    return g.turn_advantages(
        mx.array(rewards_bs.astype(np.float32)).reshape(states_pgs.shape),
        baseline=loss.baseline,
        scale=loss.scale,
        discount=loss.discount,
        states_pgs=states_pgs,
    )
