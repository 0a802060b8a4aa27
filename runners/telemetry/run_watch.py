"""Checks each update's metrics: warns when training goes wrong, and decides when a run may end early.

It depends only on what is logged and on `Seen`, so that a resumed run warns and ends at the same updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from runners.config import rules
from runners.config.conditions import Condition
from runners.config.sections import WatchConfig

_MOST = 1e300
_Sum = tuple[float, float, float]  # n, Σ reward, Σ reward²


def _check_sum(_: Any, field: attrs.Attribute, found: _Sum) -> None:
    if found[0] < 0 or max(map(abs, found)) > _MOST:
        raise rules.Mismatch(list(found), "n of at least 0, Σ reward and Σ reward²", field.name)


def _check_counts(_: Any, field: attrs.Attribute, found: dict[str, int]) -> None:
    if min(found.values(), default=0) < 0:
        raise rules.Mismatch(found, "counts of at least 0", field.name)


@attrs.frozen
class Watch:
    """Counts, for each sign of trouble, for how many readings in a row it has been there."""

    settings: WatchConfig
    conditions: Sequence[Condition]  # of stop.when

    def see(self, metrics: Mapping[str, Any], seen: Seen) -> tuple[Seen, list[str]]:
        """Takes in logged metrics; returns what was seen so far, and the warnings that are due, a line each.

        A metric that is missing or not finite is ignored: it neither counts nor ends a row.
        """
        flat, reward = _number(metrics.get("frac_reward_zero_std")), _number(metrics.get("reward"))
        level = seen.level
        if flat is not None and reward is not None:
            level = level.see(reward, flat == 1)
        counts, reached, warnings = dict(seen.counts), seen.reached, []
        for name, so, line in self._signs(metrics, level):
            # Once a row, not at every update.
            if _count(counts, name, so) == self.settings.patience > 0:
                warnings.append(line)
        for condition in self.conditions:
            value = _number(metrics.get(condition.metric))
            if value is None:
                continue
            row = _count(counts, f"stop {condition} for {condition.readings}", condition.holds(value))
            if row >= condition.readings and reached is None:
                times = f" for {row} readings" if row > 1 else ""
                reached = f"{condition}{times} (stop.when): {condition.metric} = {value:.4g}"
        return Seen(counts, level, reached), warnings

    def _signs(self, metrics: Mapping[str, Any], level: RewardLevel) -> list[tuple[str, bool, str]]:
        """For each kind of trouble: its name, whether the metrics show it, and the warning."""
        settings, signs = self.settings, []
        row = f"for {settings.patience} updates"
        flat, entropy, kl = (_number(metrics.get(name)) for name in ("frac_reward_zero_std", "entropy", "kl"))
        if flat is not None:
            advice = level.advice(_number(metrics.get("learning_rate")))
            line = f"no group's completions have differed in reward {row}, {advice}"
            signs.append(("flat rewards", flat == 1, line))
        if entropy is not None and settings.min_entropy:
            line = (
                f"entropy has been below watch.min_entropy = {settings.min_entropy:g} nats a token {row}, "
                f"now {entropy:.3g}: completions hardly differ any more; lower optim.learning_rate, raise "
                "loss.epsilon_high, or set loss.entropy_coef"
            )
            signs.append(("low entropy", entropy < settings.min_entropy, line))
        if kl is not None and settings.max_kl:
            line = (
                f"kl has been above watch.max_kl = {settings.max_kl:g} nats a token {row}, now {kl:.3g}: the "
                "policy has moved far from its reference; lower optim.learning_rate, or raise loss.beta"
            )
            signs.append(("high kl", kl > settings.max_kl, line))
        return signs


def _count(counts: dict[str, int], name: str, so: bool) -> int:
    counts[name] = counts.get(name, 0) + 1 if so else 0
    return counts[name]


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) else None


@attrs.frozen
class RewardLevel:
    """The rewards of a run's updates: those of the current row of flat updates, and all others.

    An update is flat if no group's completions differ in reward.
    """

    before: _Sum = attrs.field(default=(0, 0.0, 0.0), validator=_check_sum)
    flat: _Sum = attrs.field(default=(0, 0.0, 0.0), validator=_check_sum)

    def see(self, reward: float, flat: bool) -> RewardLevel:
        """With one update more. If it ends a row of flat updates, that row is added to the others."""
        if not abs(reward) < math.sqrt(_MOST) / 1e6:  # JSON could not hold its square
            return self
        one = (1, reward, reward * reward)
        if flat:
            return RewardLevel(self.before, _added(self.flat, one))
        return RewardLevel(_added(_added(self.before, self.flat), one))

    def change(self) -> tuple[int, float, float]:
        """-1, 0 or 1 if the flat row's mean is below, like or above the mean before; then the two means.

        "Like" means within two standard errors of the mean of as many earlier updates. 0 without updates.
        """
        (n, total, squares), (m, row, _) = self.before, self.flat
        if not n or not m:
            return 0, math.nan, math.nan
        mean, now = total / n, row / m
        error = math.sqrt(max(squares / n - mean * mean, 0.0) / m)
        return (now > mean + 2 * error) - (now < mean - 2 * error), mean, now

    def advice(self, learning_rate: float | None) -> str:
        """What to do about rewards that are equal within every group; the rate is that of the last update."""
        change, before, now = self.change()
        if change < 0:
            used = f" (now {learning_rate:.3g})" if learning_rate is not None else ""
            return (
                f"and the reward has fallen from {before:.3g} to {now:.3g}: the policy has probably "
                f"collapsed (see completions.jsonl); lower optim.learning_rate{used} or raise loss.beta, and "
                "start over or resume from an earlier checkpoint"
            )
        if change > 0:
            return (
                f"and the reward has risen from {before:.3g} to {now:.3g}: the prompts have become too easy, "
                "and nothing more is learned from them; give harder ones, or end the run"
            )
        return (
            "so nothing is learned: use prompts of other difficulty, raise "
            "rollout.num_generations or rollout.temperature, or look at the rewards with `grpo check CONFIG`"
        )


def _added(one: _Sum, other: _Sum) -> _Sum:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


@attrs.frozen
class Seen:
    """What a run's readings have shown so far; a part of its state."""

    counts: dict[str, int] = attrs.field(factory=dict, validator=_check_counts)  # readings in a row
    level: RewardLevel = attrs.field(factory=RewardLevel)
    reached: str | None = None  # the condition that ends the run
