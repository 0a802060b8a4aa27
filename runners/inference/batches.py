"""Many completions, or conversations with tools, in batches: for `grpo generate`, `grpo eval`, and a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.trees import on_host
from runners.data.prompts import Example
from runners.engines.engine import Cancelled, Requests, Samples, ShouldStop, never
from runners.engines.settings import DEFAULT_ROWS, requests_of
from runners.environments.environments import Environments
from runners.images.tower import VisionPart
from runners.rewards.builtin import answer_text
from runners.rewards.finished_episodes import FinishedEpisodes
from runners.tokenization.text import TextDecoder

STOP, LENGTH, INTERRUPTED = "stop", "length", "interrupted"


@attrs.frozen(eq=False)
class Batch:
    """Finished completions, G of each example in a row. The next conversations reuse their environments."""

    examples: Sequence[Example]
    rollout: g.Rollout
    texts: list[str]  # of each row, the nudge in front; of a conversation the model's last turn
    lengths: list[int]  # tokens of each row that were sampled
    finish: list[str]  # why each row ended: STOP, by an end token or a stop string; LENGTH; INTERRUPTED
    seconds: float
    played: FinishedEpisodes | None  # the conversations; None: there are no tools


def sample_batches(
    engine: Samples,
    examples: Sequence[Example],
    sampling: g.Sampling,
    *,
    key: mx.array,
    decoder: TextDecoder,
    nudge: str = "",
    rows: int = 0,
    environments: Environments | None = None,
    vision: VisionPart | None = None,
    should_stop: ShouldStop = never,
    numbered: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Completions of all examples, in order; completion g of example n draws from (key, n, g).

    They do not depend on how many `rows` are sampled at a time (0: 256). `environments` answer turns; None:
    each completion is one turn. `should_stop` ends the present batch, which is given as it is. `numbered` are
    the n of the examples; None: 0, 1, 2, …
    """
    together = max((rows or DEFAULT_ROWS) // sampling.num_generations, 1)
    sampler, how = _KeepsPartial(engine), {"key": key, "should_stop": should_stop}
    for start in range(0, len(examples), together):
        began, part = time.perf_counter(), examples[start : start + together]
        numbers, played = (numbered or range(len(examples)))[start : start + len(part)], None
        if environments is None:
            rollout = sampler.generate(requests_of(part, numbers, vision), sampling, **how)
            sampled = rollout.completions()
            texts = [nudge + decoder.decode(tokens) for tokens in sampled]
        else:
            rollout, played = environments.play(sampler, part, sampling, numbers=numbers, **how)
            sampled, texts = played.sampled, [answer_text(messages) for messages in played.messages]
        finish = []
        for finished, length in zip(on_host(rollout.finished_b), on_host(rollout.lengths_b), strict=True):
            # A conversation that is cut may have ended a turn, not itself.
            whole = finished and not (sampler.cut and played is not None)
            cut = sampler.cut and length < sampling.max_new_tokens
            finish.append(STOP if whole else INTERRUPTED if cut else LENGTH)
        spent = time.perf_counter() - began
        yield Batch(part, rollout, texts, list(map(len, sampled)), finish, spent, played)
        if sampler.cut:
            return


class _KeepsPartial:
    """An engine whose interrupted rollouts count as they are."""

    def __init__(self, engine: Samples) -> None:
        self._engine, self.cut = engine, False

    def generate(
        self, requests: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> g.Rollout:
        try:
            return self._engine.generate(requests, sampling, key=key, should_stop=should_stop)
        except Cancelled as cancelled:
            self.cut = True
            return cancelled.rollout
