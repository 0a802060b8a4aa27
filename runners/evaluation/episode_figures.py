"""Figures of conversations with tools: success, rewards, turns and calls, one number per problem."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from runners.rewards.finished_episodes import FinishedEpisodes

SUCCESS = 1.0  # an episode is a success if the environment's own reward is at least this


@attrs.frozen
class EpisodeFigures:
    """Figures of some conversations, in order."""

    success: tuple[
        bool, ...
    ] = ()  # the environment's reward is high enough; without one, the answer is the gold one
    reward: tuple[float | None, ...] = ()  # the environment's own; None: it gave none
    turns: tuple[int, ...] = ()
    calls: tuple[int, ...] = ()
    failures: tuple[int, ...] = ()  # of the calls
    seconds: tuple[float, ...] = ()  # that a conversation's calls took

    @classmethod
    def of(
        cls,
        played: FinishedEpisodes,
        right: Sequence[bool],
        rewards: Sequence[float | None] | None,
        success_at: float,
    ) -> EpisodeFigures:
        """`right`: the answer is the gold one. `rewards`: the environments' own; None: there are none."""
        if rewards is None:
            success = [each and not fault for each, fault in zip(right, played.faults, strict=True)]
        else:
            success = [reward is not None and reward >= success_at for reward in rewards]
        return cls(
            success=tuple(success),
            reward=tuple(rewards or ()),
            turns=tuple(played.counts["turns"].tolist()),
            calls=tuple(played.counts["calls"].tolist()),
            failures=tuple(played.counts["failures"].tolist()),
            seconds=played.seconds,
        )

    def concatenated(self, other: EpisodeFigures) -> EpisodeFigures:
        """These, then those."""
        return EpisodeFigures(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in attrs.fields(EpisodeFigures)}
        )

    def picked(self, places: Sequence[int]) -> EpisodeFigures:
        """Of these places, in their order."""
        columns = {f.name: getattr(self, f.name) for f in attrs.fields(EpisodeFigures)}
        return EpisodeFigures(
            **{name: tuple(values[n] for n in places) for name, values in columns.items() if values}
        )

    def metrics(self) -> dict[str, float]:
        """Means for a run's log; without a reward, that metric is left out."""
        known = [reward for reward in self.reward if reward is not None]
        return {
            "eval/success": _mean(self.success),
            **({"eval/reward": _mean(known)} if known else {}),
            "eval/turns": _mean(self.turns),
            "eval/tool_calls": _mean(self.calls),
            "eval/failed_calls": _mean(self.failures),
        }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
