"""When groups no longer differ in reward: whether the reward has fallen or risen, and so what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from runners.errors import UserError, show

_KEY = "watch_rewards"
_MOST = 1e300


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
                f"trainer_state.json: {_KEY}: found {show(found)}, wanted before and flat, three numbers each"
            )
        self.before, self.flat = (list(part) for part in parts)


def _is_sum(part: list[Any]) -> bool:
    numbers = [value for value in part if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(part) == 3 and numbers[0] >= 0 and all(abs(value) < _MOST for value in numbers)
