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
    keep_partial: bool = False,
) -> Iterator[Batch]:
    """Completions of all examples, in order. They do not depend on how many are sampled at a time.

    Args:
        engine: it samples, with the weights that it has loaded.
        examples, sampling, key: completion g of example n draws from (key, n, g).
        decoder, nudge: for the texts.
        rows: completions at a time; 0: 256.
        environments: they answer turns; None: each completion is one turn.
        vision: for prompts with images.
        should_stop: ends the sampling, which raises Cancelled.
        keep_partial: if `should_stop` ends it, give the present batch as it is instead, and no other.
    """
    size = sampling.num_generations
    together = max((rows or DEFAULT_ROWS) // size, 1)
    sampler = _KeepsPartial(engine) if keep_partial else engine
    for start in range(0, len(examples), together):
        began, part = time.perf_counter(), examples[start : start + together]
        numbers, played = range(start, start + len(part)), None
        if environments is None:
            requests = requests_of(part, numbers, vision)
            rollout = sampler.generate(requests, sampling, key=key, should_stop=should_stop)
        else:
            rollout, played = environments.play(
                sampler, part, sampling, key=key, numbers=numbers, should_stop=should_stop
            )
        cut = isinstance(sampler, _KeepsPartial) and sampler.cut
        sampled = rollout.completions() if played is None else played.sampled
        if played is None:
            texts = [nudge + decoder.decode(tokens) for tokens in sampled]
        else:
            texts = [answer_text(messages) for messages in played.messages]
        limit = sampling.max_new_tokens
        finish = []
        for finished, length in zip(on_host(rollout.finished_b), on_host(rollout.lengths_b), strict=True):
            # A conversation that is cut may have ended a turn, not itself.
            whole = finished and not (cut and played is not None)
            finish.append(STOP if whole else INTERRUPTED if cut and length < limit else LENGTH)
        spent = time.perf_counter() - began
        yield Batch(part, rollout, texts, list(map(len, sampled)), finish, spent, played)
        if cut:
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
