"""Checks each update's metrics: warns when training goes wrong, and decides when a run may end early.

It depends only on what is logged, so that a resumed run warns and ends at the same updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from runners.config.conditions import Condition
from runners.config.sections import WatchConfig
from runners.errors import UserError, count_in, show

_KEY = "watch_rewards"
_MOST = 1e300


class Watch:
    """Counts, for each sign of trouble, for how many readings in a row it has been there."""

    def __init__(self, settings: WatchConfig, conditions: Sequence[Condition]) -> None:
        """[watch], and the conditions of stop.when."""
        self._settings, self._conditions = settings, tuple(conditions)
        self._counts: dict[str, int] = {}
        self._level = RewardLevel()
        self.reached: str | None = None  # the condition that ends the run

    def see(self, metrics: Mapping[str, Any]) -> list[str]:
        """Takes in logged metrics; returns the warnings that are due, a line each.

        A metric that is missing or not finite is ignored: it neither counts nor ends a row.
        """
        flat, reward = _number(metrics.get("frac_reward_zero_std")), _number(metrics.get("reward"))
        if flat is not None and reward is not None:
            self._level.see(reward, flat == 1)
        warnings = [line for name, so, line in self._signs(metrics) if self._due(name, so)]
        for condition in self._conditions:
            value = _number(metrics.get(condition.metric))
            if value is None:
                continue
            row = self._count(f"stop {condition} for {condition.readings}", condition.holds(value))
            if row >= condition.readings and self.reached is None:
                times = f" for {row} readings" if row > 1 else ""
                self.reached = f"{condition}{times} (stop.when): {condition.metric} = {value:.4g}"
        return warnings

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"watch": dict(self._counts), **self._level.facts()}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's facts. Raises UserError if `facts` did not make them."""
        found = facts.get("watch", {})
        if not isinstance(found, dict):
            raise UserError(f"trainer_state.json: watch: found {show(found)}, expected a JSON object")
        self._counts = {str(name): count_in(found, name, 0) for name in found}
        self._level.restore(facts)

    def _signs(self, metrics: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
        """For each kind of trouble: its name, whether the metrics show it, and the warning."""
        settings, signs = self._settings, []
        row = f"for {settings.patience} updates"
        flat, entropy, kl = (_number(metrics.get(name)) for name in ("frac_reward_zero_std", "entropy", "kl"))
        if flat is not None:
            advice = self._level.advice(_number(metrics.get("learning_rate")))
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

    def _due(self, name: str, so: bool) -> bool:
        # Once a row, not at every update.
        return self._count(name, so) == self._settings.patience > 0

    def _count(self, name: str, so: bool) -> int:
        self._counts[name] = self._counts.get(name, 0) + 1 if so else 0
        return self._counts[name]


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) else None


@attrs.define
class RewardLevel:
    """The rewards of a run's updates: those of the current row of flat updates, and all others.

    An update is flat if no group's completions differ in reward.
    """

    before: list[float] = attrs.field(factory=lambda: [0, 0.0, 0.0])  # n, Σ reward, Σ reward²
    flat: list[float] = attrs.field(factory=lambda: [0, 0.0, 0.0])

    def see(self, reward: float, flat: bool) -> None:
        """Takes in an update. If it ends a row of flat updates, that row is added to the others."""
        if not abs(reward) < math.sqrt(_MOST) / 1e6:  # JSON could not hold its square
            return
        if not flat:
            self.before = [one + other for one, other in zip(self.before, self.flat, strict=True)]
            self.flat = [0, 0.0, 0.0]
        into = self.flat if flat else self.before
        into[:] = [into[0] + 1, into[1] + reward, into[2] + reward * reward]

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

    def facts(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {_KEY: attrs.asdict(self)}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's facts. Raises UserError if `facts` did not make them."""
        if _KEY not in facts:  # a checkpoint from before this was kept
            return
        found = facts[_KEY]
        parts: list[Any] = [found.get(name) for name in ("before", "flat")] if isinstance(found, dict) else []
        if not parts or not all(isinstance(part, list) and _is_sum(part) for part in parts):
            raise UserError(
                f"trainer_state.json: {_KEY}: found {show(found)}, expected three numbers in before and flat"
            )
        self.before, self.flat = (list(part) for part in parts)


def _is_sum(part: list[Any]) -> bool:
    numbers = [value for value in part if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(part) == 3 and numbers[0] >= 0 and all(abs(value) < _MOST for value in numbers)
