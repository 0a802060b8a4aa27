"""Figures of conversations with tools: success, rewards, turns and calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from runners.rewards.finished_episodes import FinishedEpisodes

SUCCESS = 1.0  # an episode is a success if the environment's own reward is at least this


@attrs.frozen
class EpisodeFigures:
    """Figures of one conversation."""

    success: bool  # the environment's reward is high enough; without one, the answer is the gold one
    reward: float | None  # the environment's own; None: it gave none
    turns: int
    calls: int
    failures: int  # of the calls
    seconds: float  # that the calls took


def episode_figures(
    played: FinishedEpisodes,
    right: Sequence[bool],
    rewards: Sequence[float | None] | None,
    success_at: float = SUCCESS,
) -> list[EpisodeFigures]:
    """Of each conversation. `right`: its answer is the gold one. `rewards`: the environments' own; None:
    there are none."""
    if rewards is None:
        success = [each and not fault for each, fault in zip(right, played.faults, strict=True)]
    else:
        success = [reward is not None and reward >= success_at for reward in rewards]
    counts = (played.counts[name].tolist() for name in ("turns", "calls", "failures"))
    columns = (success, rewards or [None] * len(success), *counts, played.seconds)
    return [EpisodeFigures(*row) for row in zip(*columns, strict=True)]


def logged_figures(figures: Sequence[EpisodeFigures]) -> dict[str, float]:
    """Means for a run's log; without a reward, that metric is left out. Empty without figures."""
    if not figures:
        return {}
    known = [each.reward for each in figures if each.reward is not None]
    return {
        "eval/success": _mean([each.success for each in figures]),
        **({"eval/reward": _mean(known)} if known else {}),
        "eval/turns": _mean([each.turns for each in figures]),
        "eval/tool_calls": _mean([each.calls for each in figures]),
        "eval/failed_calls": _mean([each.failures for each in figures]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
