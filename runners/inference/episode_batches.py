"""Conversations with tools in batches: for `grpo generate`, `grpo eval`, and a run's own evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.rollout import FindStop, Replies
from grpo_fn.trees import Tree, on_host
from runners.data.prompts import Example
from runners.environments.environments import Environments
from runners.inference.text_generation import INTERRUPTED, LENGTH, STOP
from runners.rewards.builtin import answer_text
from runners.rewards.finished_episodes import FinishedEpisodes


@attrs.frozen(eq=False)
class Episodes:
    """Finished conversations, G of each example in a row. The next conversations reuse their environments."""

    examples: tuple[Example, ...]
    rollout: g.Rollout
    played: FinishedEpisodes
    finish: tuple[str, ...]  # "stop", "length" or "interrupted" of each
    seconds: float  # of all together

    @property
    def texts(self) -> list[str]:
        """The model's last turn in each."""
        return [answer_text(messages) for messages in self.played.messages]


def play_episodes(
    environments: Environments,
    policy: g.Policy,
    params: Tree,
    examples: Sequence[Example],
    sampling: g.Sampling,
    *,
    key: mx.array,
    decoding: g.Decoding | None = None,
    rows: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Episodes]:
    """All examples, at most `rows` conversations at a time. If `stopped()` is true, the current ones end."""
    together = max(rows // sampling.num_generations, 1)
    for start in range(0, len(examples), together):
        part = examples[start : start + together]
        began = time.perf_counter()

        def play(
            prompts: Sequence[Sequence[int]],
            size: int,
            replies: Replies,
            stops: frozenset[int],
            first: int = start,
            examples: int = len(part),
        ) -> g.Rollout:
            return g.generate(
                policy,
                params,
                prompts,
                attrs.evolve(
                    sampling,
                    num_generations=size,
                    eos_ids=sampling.eos_ids | stops,
                    find_stop=_ending(sampling.find_stop, stopped),
                ),
                key=key,
                prompt_numbers=[first * (len(prompts) // examples) + place for place in range(len(prompts))],
                decoding=decoding,
                replies=_Until(replies, stopped),
            )

        rollout, played = environments.play(part, sampling.num_generations, play)
        finished = on_host(rollout.finished_b)
        cut = INTERRUPTED if stopped() else STOP
        yield Episodes(
            tuple(part),
            rollout,
            played,
            tuple(cut if whole else LENGTH for whole in finished),
            time.perf_counter() - began,
        )
        if stopped():
            return


def _ending(find_stop: FindStop | None, stopped: Callable[[], bool]) -> FindStop:
    def end(tokens: Sequence[int], start: int) -> int | None:
        if stopped():
            return len(tokens)
        return None if find_stop is None else find_stop(tokens, start)

    return end


class _Until:
    """Replies that answer no turn after a request to stop."""

    def __init__(self, replies: Replies, stopped: Callable[[], bool]) -> None:
        self._replies, self._stopped = replies, stopped
        self.collect = replies.collect

    def begin(self, row: int, tokens: Sequence[int]) -> bool:
        return not self._stopped() and self._replies.begin(row, tokens)
