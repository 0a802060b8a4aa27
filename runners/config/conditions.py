"""The conditions of `stop.when`, such as "kl > 0.5 for 20", and the metrics that they may name."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable

import attrs

from runners.config.sections import judge_of
from runners.errors import nearest

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
    "tokens_per_second/step",
    "time/rollout",
    "time/reward",
    "time/learner",
    "time/update",
    "time/sync",
    "time/checkpoint",
    "time/rest",
    "time/eval",
    "time/elapsed",
    "memory/active_gb",
    "memory/peak_gb",
    "memory/swap_gb",
    "tools/call_frequency",
    "tools/failure_frequency",
    "tools/timeouts",
    "tools/cut_observations",
    "turns/mean",
    "turns/max",
    "experts/max_load",
    "experts/unused",
    "experts/balance",
    "eval/success",
    "eval/reward",
    "eval/turns",
    "eval/tool_calls",
    "eval/failed_calls",
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
"""Numbers that a condition may name, besides judges' and `rewards/NAME/mean` and `rewards/NAME/std`."""


JUDGE_METRICS = (
    "requests",
    "cached",
    "failed",
    "latency",
    "slowest",
    "tokens_in",
    "tokens_out",
    "cost",
    "total_cost",
)
"""What a judge logs, as `judge/NAME/…`."""


CONDITION_FORM = '"METRIC < NUMBER" or "METRIC < NUMBER for READINGS", with <, <=, > or >='


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
        """The condition in a text such as "kl > 0.5 for 20"; None if it cannot be read."""
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
        """Whether one reading meets the condition."""
        return _SIGNS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


def unknown_metric(metric: str, rewards: Iterable[str]) -> str | None:
    """None if the metric is known. Otherwise the name to write instead, or "" if none is near.

    `rewards` are the config's reward.functions.
    """
    names = {spelling for name in rewards for spelling in (name, name.rpartition(":")[2])}
    judged = [
        f"judge/{judge}/{part}" for name in rewards if (judge := judge_of(name)) for part in JUDGE_METRICS
    ]
    known = [
        *METRICS,
        *judged,
        *(f"rewards/{name}/{part}" for name in sorted(names) for part in ("mean", "std")),
    ]
    if metric in known:
        return None
    return nearest(metric, known) or ""
