"""Detects that a run has become worse: compares its last reading with its best reading, taking
their standard errors into account.

A reading is a held-out score or the mean reward over the last updates, together with the means of
metrics that may explain a decline.
"""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Self

import attrs

from runners.config.loading import Config

EXACT_MATCH = "held-out exact match"
HELD_OUT_REWARD = "held-out reward"
REWARD = "reward"
WINDOW = 10  # updates in a mean
_HISTORY = 50  # updates from which the variance of the reward is estimated
# A reading counts as worse if it is this many standard errors (of the difference) below the best
# one. Scores of the same problems vary less than their standard error; the best of many mean
# rewards is partly luck, so it needs a wider margin.
_SCORE_ERRORS = 2.5
_REWARD_ERRORS = 5.0
_FEWER_ERRORS = 3.0  # for the reward, if completion lengths or gradients changed too
# Factors by which these metrics must have changed; lengths may also have shrunk by the factor.
_CHANGES = {"completions/mean_length": 3.0, "grad_norm": 10.0}
_CLIPPED = "clip_ratio/region_mean"
_MEANS = (*_CHANGES, "frac_reward_zero_std", _CLIPPED, "sampling/effective_sample_size")
_LOWER = 5  # the suggested learning rate is the current one divided by this


@attrs.frozen
class Reading:
    """A mean and its variance, and other metrics' means over the last updates."""

    update: int
    value: float
    variance: float
    means: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Progress:
    """A run's best readings, and the readings that are now worse. This object is part of the run's
    state.
    """

    recent: dict[str, tuple[float, ...]] = attrs.field(factory=dict)  # values of the last updates
    best: dict[str, Reading] = attrs.field(factory=dict)
    worse: dict[str, str] = attrs.field(factory=dict)  # warnings, by reading

    @property
    def held_out(self) -> Reading | None:
        """The best evaluation, or None if there is none yet."""
        return self.best.get(EXACT_MATCH) or self.best.get(HELD_OUT_REWARD)

    @property
    def line(self) -> str:
        """The readings that are worse now, or an empty text."""
        return "; ".join(self.worse.values())

    def updated(self, metrics: Mapping[str, float], config: Config) -> Self:
        """Returns the state after an update. The reward is not compared if the prompts become
        harder.
        """
        if REWARD not in metrics:  # a supervised update
            return self
        recent = {
            name: (*self.recent.get(name, ()), metrics[name])[-_HISTORY:]
            for name in (REWARD, *_MEANS)
            if name in metrics
        }
        progress = attrs.evolve(self, recent=recent)
        rewards = recent[REWARD]
        if len(rewards) < WINDOW or config.data.curriculum != "none":
            return progress
        # Differences between consecutive updates, so that a trend does not count as variance.
        steps = [(late - early) ** 2 for early, late in itertools.pairwise(rewards)]
        variance = statistics.fmean(steps) / 2 / WINDOW
        means = progress.means
        last = Reading(int(metrics["update"]), means[REWARD], variance, means)
        return progress._compared(REWARD, last, config)

    def evaluated(self, metrics: Mapping[str, float], update: int, config: Config) -> Self:
        """Returns the state after an evaluation."""
        scored = "em" in metrics
        value = metrics.get("em" if scored else "eval/reward")
        if value is None:
            return self
        variance = value * (1 - value) if scored else metrics.get("eval/reward_std", 0.0) ** 2
        last = Reading(update, value, variance / metrics["em_subset"], self.means)
        return self._compared(EXACT_MATCH if scored else HELD_OUT_REWARD, last, config)

    @property
    def means(self) -> dict[str, float]:
        """The reading of the last updates."""
        return {name: statistics.fmean(values[-WINDOW:]) for name, values in self.recent.items()}

    def _compared(self, name: str, last: Reading, config: Config) -> Self:
        """Returns the state after this reading. The reading may become the best one or, if it is
        far below the best, a worse one.

        The reading counts as worse until less than half of that distance remains.
        """
        best = self.best.get(name)
        worse = dict(self.worse)
        if best is None or last.value > best.value:
            worse.pop(name, None)
            return attrs.evolve(self, best=self.best | {name: last}, worse=worse)
        least = _SCORE_ERRORS
        if name == REWARD:
            least = _FEWER_ERRORS if _changes(last, best) else _REWARD_ERRORS
        error = math.sqrt(last.variance + best.variance)
        errors = (best.value - last.value) / max(error, 1e-9)
        if errors > least and name not in worse:
            worse[name] = _line(name, last, best, config)
        elif errors < least / 2:
            worse.pop(name, None)
        return attrs.evolve(self, worse=worse)


def _line(name: str, last: Reading, best: Reading, config: Config) -> str:
    """Returns the warning: the reading that fell, the metrics that changed with it, and the config
    key that is the likeliest cause.
    """
    form = ".1%" if name == EXACT_MATCH else ".3g"
    was, now = (f"{each.value:{form}} (update {each.update})" for each in (best, last))
    changes = [
        f", {key} went from {best.means[key]:.3g} to {last.means[key]:.3g}"
        for key in _changes(last, best)
    ]
    return f"{name} fell from {was} to {now}{''.join(changes)}; {_cause(name, last, best, config)}"


def _changes(last: Reading, best: Reading) -> list[str]:
    """Returns the means that confirm a decline."""
    found = []
    for name, most in _CHANGES.items():
        factor = last.means.get(name, 0.0) / (best.means.get(name) or math.inf)
        if factor > most or (name != "grad_norm" and 0 < factor < 1 / most):
            found.append(name)
    return found


def _cause(name: str, last: Reading, best: Reading, config: Config) -> str:
    """Returns the config key that is the likeliest cause, with a value to try."""
    optim = config.optim
    if last.means and name != REWARD and last.means[REWARD] > best.means.get(REWARD, math.inf):
        key = "reward.functions" if name == EXACT_MATCH else "optim.num_epochs"
        return f"{key} is the likeliest cause, because the reward rose: read completions.jsonl"
    if last.means.get(_CLIPPED, 0.0) > 0.2:
        uses = optim.num_iterations * optim.minibatches
        return (
            f"{uses} updates per rollout are the likeliest cause: lower optim.num_iterations or "
            "optim.minibatches"
        )
    if last.means.get("sampling/effective_sample_size", 1.0) < 0.5:
        return (
            "the likeliest cause is a difference between sampler and learner: set loss.correction"
        )
    key = "optim" if last.means else "sft"  # only supervised updates so far
    rate = (optim if last.means else config.sft).learning_rate
    return f"{key}.learning_rate = {rate:g} is the likeliest cause: try {rate / _LOWER:g}"
