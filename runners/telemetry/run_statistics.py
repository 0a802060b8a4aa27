"""Computes the metrics of one update, under TRL's names."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.algorithm import SURROGATES
from runners.config.loading import Config
from runners.data.curriculum import rate_metrics
from runners.rewards.experience import COUNTS, Experience, is_varied, length_penalty


@attrs.frozen(eq=False)
class Tally:
    """Statistics for one batch step, kept for logging after the completions are freed."""

    rewards_pg: np.ndarray  # float64, combined; NaN = no reward
    values_kb: np.ndarray  # float64, of each reward function
    lengths_b: np.ndarray  # tokens
    finished_b: np.ndarray  # whether a completion ended before the length limit
    sampled_tokens: int
    resampled: int
    logged: dict[str, list[float]]  # metrics that rewards logged
    seconds: dict[str, float]
    # counts of each conversation: see `rewards.experience`
    counts: dict[str, np.ndarray] = attrs.field(factory=dict)
    # the arguments of `rate_metrics`
    outcomes: list[tuple[float, int, int]] = attrs.field(factory=list)
    quantization: str = ""  # format of the sampler's weights
    # for each completion: updates between its sampler's weights and the learner's
    ages_b: np.ndarray = attrs.field(factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, experience: Experience, update: int = 0) -> Self:
        """Returns the statistics for one batch step that the learner uses after this update."""
        played = experience.played or ()
        version_b = experience.rollout.version_b
        versions_b = np.zeros(0) if version_b is None else np.array(version_b, np.float64)
        return cls(
            rewards_pg=experience.rewards_pg,
            values_kb=experience.values_kb,
            lengths_b=experience.sampled_lengths[experience.drawn_b],
            finished_b=np.array(experience.rollout.finished_b)[experience.drawn_b],
            sampled_tokens=experience.sampled_tokens,
            resampled=experience.resampled,
            logged={
                name: [float(value) for value in values]
                for name, values in experience.logged.items()
            },
            seconds=dict(experience.seconds),
            counts={
                name: np.array([each.counts[name] for each in played]) for name in COUNTS if played
            },
            ages_b=update - versions_b[experience.drawn_b] if versions_b.size else versions_b,
        )


def rollout_metrics(
    tallies: Sequence[Tally], rewards: Sequence[str], config: Config
) -> dict[str, float]:
    """Computes reward and completion statistics over an update's batch steps. A statistic without
    values is NaN.

    `reward_std` is the standard deviation within a group, averaged over groups.
    `frac_reward_zero_std` is the share of groups without an advantage from `loss.baseline`: groups
    without variance, or, with `batch_mean`, all groups of a batch step without variance. A metric
    that a reward logs keeps its name unless one of these metrics has the same name.
    """
    steps = [tally.rewards_pg for tally in tallies]
    rewards_pg = np.concatenate(steps)
    values_kb = np.concatenate([tally.values_kb for tally in tallies], axis=1)
    lengths = np.concatenate([tally.lengths_b for tally in tallies])
    finished = np.concatenate([tally.finished_b for tally in tallies])
    penalty_b = length_penalty(config, mx.array(lengths))
    varied = is_varied(rewards_pg)
    if config.loss.baseline == "batch_mean":
        # The rewards of a whole batch step are compared, so its groups share one result.
        of_steps = [is_varied(step.reshape(1, -1)) for step in steps]
        varied = np.repeat(np.concatenate(of_steps), list(map(len, steps)))
    logged: dict[str, list[float]] = {}
    for tally in tallies:
        for name, values in tally.logged.items():
            logged.setdefault(name, []).extend(values)
    metrics = {name: mean_of(np.array(values)) for name, values in logged.items()} | {
        "reward": mean_of(rewards_pg),
        "reward_std": mean_of(np.array([_std(group) for group in rewards_pg])),
        "frac_reward_zero_std": float(np.mean(~varied)),
    }
    for name, values_b in zip(rewards, values_kb, strict=True):
        metrics |= {
            f"rewards/{name}/mean": mean_of(values_b),
            f"rewards/{name}/std": _std(values_b),
        }
    metrics |= {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - finished.mean()),
    }
    if config.rollout.max_staleness and lengths.sum():
        ages = np.concatenate([tally.ages_b for tally in tallies])
        metrics |= {
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
            "staleness/tokens": float((ages * lengths).sum() / lengths.sum()),
        }
    if penalty_b is not None:  # a part of the rewards
        metrics["length_penalty"] = float(np.array(penalty_b).mean())
    if all(tally.counts for tally in tallies):
        metrics |= _turn_metrics(tallies)
    resampled = sum(tally.resampled for tally in tallies)
    drawn = sum(tally.sampled_tokens for tally in tallies)
    if resampled:
        metrics |= {
            "dynamic_sampling/resampled_groups": float(resampled),
            "dynamic_sampling/tokens_per_used_token": drawn / max(int(lengths.sum()), 1),
        }
    taught = int(varied.sum())
    metrics["groups/taught"] = taught / (len(varied) + resampled)
    if taught:
        metrics["groups/tokens_per_taught"] = drawn / taught
    outcomes = itertools.chain.from_iterable(tally.outcomes for tally in tallies)
    return metrics | rate_metrics(list(outcomes))


def _turn_metrics(tallies: Sequence[Tally]) -> dict[str, float]:
    """Computes turn and tool-call metrics over an update's conversations. Frequencies are defined
    as in TRL.
    """
    counts = {
        name: np.concatenate([tally.counts[name] for tally in tallies])
        for name in tallies[0].counts
    }
    calls = int(counts["calls"].sum())
    return {
        "tools/call_frequency": float(counts["calls"].mean()),
        "tools/failure_frequency": float(counts["failures"].sum()) / calls if calls else 0.0,
        "tools/timeouts": float(counts["timeouts"].sum()),
        "tools/cut_observations": float(counts["cut"].sum()),
        "turns/mean": float(counts["turns"].mean()),
        "turns/max": float(counts["turns"].max()),
    }


_OF_TOKENS = {  # name in the log -> field of LossStats
    "entropy": "entropy",
    "sampling/sampling_logp_difference/mean": "logp_diff_mean",
    "sampling/sampling_logp_difference/max": "logp_diff_max",
    "sampling/importance_sampling_ratio/min": "is_ratio_min",
    "sampling/importance_sampling_ratio/mean": "is_ratio_mean",
    "sampling/importance_sampling_ratio/max": "is_ratio_max",
    "sampling/kl": "sampling_kl_k3",
    "sampling/effective_sample_size": "ess",
    "sampling/masked_fraction": "masked_fraction",
    "ratio/min": "ratio_min",
    "ratio/mean": "ratio_mean",
    "ratio/max": "ratio_max",
}
# TRL's names, by the sides that a surrogate clips
_OF_CLIPS: dict[tuple[str, ...], dict[str, str]] = {
    ("low", "high"): {
        "clip_ratio/low_mean": "clip_low",
        "clip_ratio/high_mean": "clip_high",
        "clip_ratio/region_mean": "clip_region",
    },
    ("high",): {"cispo_clip_ratio": "clip_high"},  # it caps its weight
}


def loss_metrics(
    stats: g.LossStats,
    update: g.UpdateStats,
    spec: g.LossSpec,
    *,
    has_reference: bool,
    has_teacher: bool = False,
) -> dict[str, Any]:
    """Returns the learner's metrics for an update. Token metrics are included only if there were
    tokens, and clip metrics only if the surrogate in `spec` clips.
    """
    metrics: dict[str, Any] = {
        "loss": stats.loss.item(),
        "grad_norm": update.grad_norm.item(),
        "learning_rate": update.learning_rate.item(),
    }
    if update.skipped.item():
        metrics["update_skipped"] = True
    if stats.num_tokens.item() == 0:
        return metrics
    fields = {"kl": "kl"} if has_reference else {}
    if has_teacher:
        fields["teacher/kl"] = "teacher_kl"
    fields |= _OF_TOKENS | _OF_CLIPS.get(SURROGATES[spec.surrogate].clipped_sides, {})
    return metrics | {name: getattr(stats, field).item() for name, field in fields.items()}


def mean_of(values: np.ndarray) -> float:
    """Returns the mean over the values that are not NaN, or NaN if there are none."""
    given = values[~np.isnan(values)]
    return float(given.mean()) if given.size else float("nan")


def _std(values: np.ndarray) -> float:
    given = values[~np.isnan(values)]
    return float(given.std(ddof=1)) if given.size > 1 else 0.0


PARTS = ("rollout", "reward", "learner", "update", "sync", "checkpoint")


class PartTimes:
    """Measures the seconds of each part since the clock was started."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts the clock."""
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._started = clock()

    def add(self, part: str, seconds: float) -> None:
        """Adds time that was measured elsewhere to one of PARTS."""
        self._seconds[part] += seconds

    @contextmanager
    def timing(self, part: str | None) -> Iterator[None]:
        """Adds the duration of the `with` block to one of PARTS. None means that the block is not
        part of a step.
        """
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            if part is None:
                self._started += seconds
            else:
                self.add(part, seconds)

    def take(self) -> dict[str, float]:
        """Returns `step_time`, `time/PART` for each part, and `time/rest`, in seconds, and restarts
        the clock at 0.
        """
        now = self._clock()
        whole = now - self._started
        parts = self._seconds
        self._started = now
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return {
            "step_time": whole,
            **{f"time/{part}": seconds for part, seconds in parts.items()},
            "time/rest": whole - sum(parts.values()),
        }
