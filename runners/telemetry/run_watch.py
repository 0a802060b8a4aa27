"""Checks the metrics of updates and evaluations, warns when training goes wrong, and decides when a
run ends early.

Warnings and ends depend only on logged values and on `Seen`, so a resumed run warns and ends at the
same updates.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from runners.config.conditions import Condition
from runners.config.loading import Config
from runners.config.sections import WatchConfig
from runners.files.json_files import finite_number
from runners.telemetry.decline import Progress


@attrs.frozen
class Seen:
    """A summary of the run's readings so far, which is part of the run's state."""

    counts: dict[str, int] = attrs.field(factory=dict)  # consecutive readings
    reached: str | None = None  # the condition that ends the run
    progress: Progress = attrs.field(factory=Progress)


@attrs.frozen
class Watch:
    """Counts, for each sign of trouble, the consecutive readings that show it."""

    config: Config
    conditions: Sequence[Condition]  # of stop.when

    def see(
        self, metrics: Mapping[str, Any], seen: Seen, evaluated_at: int | None = None
    ) -> tuple[Seen, list[str]]:
        """Processes the metrics logged for an update or for the evaluation after it. Returns the
        readings so far, and the warnings that are due, one line each.

        A metric that is missing or not finite is ignored and does not change a count.
        """
        counts = dict(seen.counts)
        reached = seen.reached
        warnings = []
        numbers = {
            name: value for name, value in metrics.items() if finite_number(value) is not None
        }
        patience = self.config.watch.patience
        for name, so, line in _signs(numbers, self.config.watch):
            # One warning for a series of updates, not one for each update.
            if _count(counts, name, so) == patience > 0:
                warnings.append(line)
        for condition in self.conditions:
            value = numbers.get(condition.metric)
            if value is None:
                continue
            name = f"stop {condition} for {condition.readings}"
            row = _count(counts, name, condition.holds(value))
            if row >= condition.readings and reached is None:
                times = f" for {row} readings" if row > 1 else ""
                reached = f"{condition}{times} (stop.when): {condition.metric} = {value:.4g}"
        progress = seen.progress
        if evaluated_at is not None:
            progress = progress.evaluated(numbers, evaluated_at, self.config)
        elif "update" in numbers:
            progress = progress.updated(numbers, self.config)
            row = _count(counts, "worse", bool(progress.worse))
            if row >= self.config.stop.patience > 0 and reached is None:
                reached = f"{progress.line} (stop.patience)"
        if patience:
            warnings += [
                progress.worse[name] for name in progress.worse.keys() - seen.progress.worse
            ]
        return Seen(counts, reached, progress), warnings


def _signs(metrics: Mapping[str, float], settings: WatchConfig) -> Iterator[tuple[str, bool, str]]:
    """Yields, for each kind of trouble, its name, whether the metrics show it, and the warning."""
    row = f"for {settings.patience} updates"
    flat = metrics.get("frac_reward_zero_std")
    if flat is not None:
        yield (
            "flat rewards",
            flat == 1,
            f"no group's completions have differed in reward {row}, so there is no gradient "
            f"(reward now {metrics.get('reward', 0):.3g}). If the reward has fallen, the policy "
            "has "
            "collapsed: lower optim.learning_rate "
            f"(now {metrics.get('learning_rate', 0):.3g}) or raise loss.beta, and resume from an "
            "earlier checkpoint. If it has risen, use harder prompts. Otherwise, use prompts of "
            "a different difficulty (`grpo difficulty CONFIG`), raise rollout.num_generations or "
            "rollout.temperature, or try `grpo check CONFIG`",
        )
    entropy = metrics.get("entropy")
    if entropy is not None and settings.min_entropy:
        yield (
            "low entropy",
            entropy < settings.min_entropy,
            f"entropy has been below watch.min_entropy = {settings.min_entropy:g} nats per token "
            f"{row}, now {entropy:.3g}: completions hardly differ any more; "
            "lower optim.learning_rate, raise loss.epsilon_high, or set loss.entropy_coef",
        )
    kl = metrics.get("kl")
    if kl is not None and settings.max_kl:
        yield (
            "high kl",
            kl > settings.max_kl,
            f"kl has been above watch.max_kl = {settings.max_kl:g} nats per token {row}, "
            f"now {kl:.3g}: the policy has moved far from its reference; "
            "lower optim.learning_rate, or raise loss.beta",
        )
    if 0 < metrics.get("update", 0) <= settings.patience:
        yield from _constant_rewards(metrics, f"in each of the first {settings.patience} updates")


def _constant_rewards(metrics: Mapping[str, float], row: str) -> Iterator[tuple[str, bool, str]]:
    """Yields a sign of trouble for each reward. A reward is in trouble if all completions in an
    update have the same value, or if none has a value.
    """
    for metric, std in metrics.items():
        name = metric.removeprefix("rewards/").removesuffix("/std")
        if metric != f"rewards/{name}/std":
            continue
        mean = metrics.get(f"rewards/{name}/mean") or 1.0
        yield (
            f"constant {name}",
            std <= 1e-12 * abs(mean),
            f"reward {name} returned the same value, or none, for all completions {row}, so it "
            f"has no gradient; check completions.jsonl, the columns that it reads, and the "
            f"result of `grpo check` for a right answer",
        )


def _count(counts: dict[str, int], name: str, so: bool) -> int:
    counts[name] = counts.get(name, 0) + 1 if so else 0
    return counts[name]
