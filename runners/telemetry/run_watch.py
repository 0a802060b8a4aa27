"""Looks at each update's metrics: warns when training goes astray, and says when a run may end early.

A pure fold over what is logged, so that a resumed run warns and ends where it would have.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from runners.config.sections import WatchConfig
from runners.errors import UserError, count_in, nearest, show
from runners.telemetry.reward_level import RewardLevel

METRICS = (
    "em",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "length_penalty",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "learning_rate",
    "bad_updates",
    "update",
    "batch_step",
    "epoch",
    "num_tokens",
    "step_time",
    "tokens_per_second",
    "time/rollout",
    "time/reward",
    "time/eval",
    "time/checkpoint",
    "memory/active_gb",
    "memory/peak_gb",
    "memory/swap_gb",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "sampling/kl",
    "sampling/effective_sample_size",
    "sampling/masked_fraction",
    "ratio/min",
    "ratio/mean",
    "ratio/max",
    "dynamic_sampling/resampled_groups",
    "dynamic_sampling/tokens_per_used_token",
)
"""Numbers of the log that a condition may name, besides `rewards/NAME/mean` and `rewards/NAME/std`."""

FORM = '"METRIC < NUMBER" or "METRIC < NUMBER for READINGS", with <, <=, > or >='
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(
    r"\s*(?P<metric>[^\s<>=]+)\s*(?P<sign><=|>=|<|>)\s*(?P<limit>[^\s<>=]+)(\s+for\s+(?P<readings>\d{1,9}))?\s*"
)


@attrs.frozen
class Condition:
    """Ends a run when a metric has been on one side of a limit for some readings in a row."""

    metric: str
    sign: str
    limit: float
    readings: int = 1

    @classmethod
    def parse(cls, text: str) -> Condition | None:
        """The condition that a text says, such as "kl > 0.5 for 20"; None where it says none."""
        found = _CONDITION.fullmatch(text)
        if not found:
            return None
        try:
            limit = float(found["limit"])
        except ValueError:
            return None
        readings = int(found["readings"] or 1)
        return (
            cls(found["metric"], found["sign"], limit, readings)
            if readings and math.isfinite(limit)
            else None
        )

    def holds(self, value: float) -> bool:
        """Whether one reading is on that side."""
        return _SIGNS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


def unknown_metric(metric: str, rewards: Iterable[str]) -> str | None:
    """For a metric that no log line will have, what to write instead, or an empty string; None: it is known.

    `rewards` are the config's reward.functions.
    """
    names = {spelling for name in rewards for spelling in (name, name.rpartition(":")[2])}
    known = [*METRICS, *(f"rewards/{name}/{part}" for name in sorted(names) for part in ("mean", "std"))]
    if metric in known:
        return None
    return nearest(metric, known) or ""


class Watch:
    """Counts, for each thing to look at, for how many readings in a row it has been so."""

    def __init__(self, settings: WatchConfig, conditions: Sequence[Condition]) -> None:
        """[watch], and the conditions of stop.when."""
        self._settings, self._conditions = settings, tuple(conditions)
        self._counts: dict[str, int] = {}
        self._level = RewardLevel()
        self.reached: str | None = None  # the condition that ends the run

    def see(self, metrics: Mapping[str, Any]) -> list[str]:
        """Takes in what is logged; the warnings that are due, a line each.

        A metric that is missing or not finite is no reading: it neither counts nor ends a row.
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
        """Goes on from a checkpoint's facts; UserError where they are not what `facts` gave."""
        found = facts.get("watch", {})
        if not isinstance(found, dict):
            raise UserError(f"trainer_state.json: watch: found {show(found)}, wanted a JSON object")
        self._counts = {str(name): count_in(found, name, 0) for name in found}
        self._level.restore(facts)

    def _signs(self, metrics: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
        """Of each trouble that the metrics tell of: its name, whether it is there, and what to say then."""
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
                "policy runs away from its reference; lower optim.learning_rate, or raise loss.beta"
            )
            signs.append(("high kl", kl > settings.max_kl, line))
        return signs

    def _due(self, name: str, so: bool) -> bool:
        # Once a row: whoever reads it need not be told at every update.
        return self._count(name, so) == self._settings.patience > 0

    def _count(self, name: str, so: bool) -> int:
        self._counts[name] = self._counts.get(name, 0) + 1 if so else 0
        return self._counts[name]


def _number(value: Any) -> float | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) else None
