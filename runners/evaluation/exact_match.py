"""Evaluation: greedy exact match on held-out problems, with the same prompts as in training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import mlx.core as mx

import grpo_fn as g
from runners.data.datasets import epoch_order
from runners.data.prompts import Example
from runners.engines.engine import Samples
from runners.environments.environments import Environments
from runners.evaluation.episode_figures import EpisodeFigures, episode_figures
from runners.images.tower import VisionPart
from runners.inference.batches import sample_batches
from runners.ranks.ranks import Ranks
from runners.rewards.builtin import extract_answer, numbers_equal
from runners.tokenization.text import TextDecoder

_Item = TypeVar("_Item")


@attrs.frozen
class EvalResult:
    """Exact match over some problems."""

    seconds: float
    texts: tuple[str, ...]  # the model's texts, with the nudge in front
    right: tuple[bool, ...]  # whether each text's answer is the gold one
    figures: tuple[EpisodeFigures, ...] = ()  # of conversations with tools

    @property
    def correct(self) -> int:
        """How many are right."""
        return sum(self.right)

    @property
    def total(self) -> int:
        """Number of problems."""
        return len(self.right)

    @property
    def score(self) -> float:
        """Share of problems whose answer is right, 0–1."""
        return self.correct / self.total


def held_out(examples: Sequence[_Item], samples: int) -> list[_Item]:
    """The problems of every evaluation of a data set: `samples` of them (0: all), the same in every run."""
    if samples == 0 or samples >= len(examples):
        return list(examples)
    return [examples[i] for i in sorted(epoch_order(len(examples), 0, 0)[:samples].tolist())]


def evaluate(
    engine: Samples,
    examples: Sequence[Example],
    sampling: g.Sampling,
    *,
    decoder: TextDecoder,
    nudge: str,
    max_batch: int = 0,
    environments: Environments | None = None,
    vision: VisionPart | None = None,
) -> EvalResult:
    """Greedy completions of all examples, compared with the gold answers: numbers as numbers, else as texts.

    Args:
        engine: it samples, with the weights that it has loaded.
        examples: the problems.
        sampling: where completions end; one greedy completion of each problem is sampled.
        decoder, nudge: for their texts.
        max_batch: problems at a time; 0: 256.
        environments: with them each problem is a conversation, and the model's last turn is compared.
        vision: makes the features of images, if prompts have images.
    """
    started = time.perf_counter()
    texts: list[str] = []
    right: list[bool] = []
    figures: list[EpisodeFigures] = []
    for batch in sample_batches(
        engine,
        examples,
        attrs.evolve(sampling, num_generations=1, temperature=0, with_entropy=False),
        key=mx.random.key(0),  # greedy: nothing is drawn
        decoder=decoder,
        nudge=nudge,
        rows=max_batch,
        environments=environments,
        vision=vision,
    ):
        texts += batch.texts
        right += map(is_correct, batch.texts, (example.answer for example in batch.examples))
        if environments is not None and batch.played is not None:
            own = environments.own_rewards(batch.played)
            figures += episode_figures(batch.played, right[-len(batch.texts) :], own)
    return EvalResult(time.perf_counter() - started, tuple(texts), tuple(right), tuple(figures))


def evaluate_on_ranks(
    ranks: Ranks, engine: Samples, examples: Sequence[Example], sampling: g.Sampling, **how: Any
) -> EvalResult:
    """`evaluate` by all ranks together: each answers every N-th problem, and all get the whole result.

    `how` has the other arguments of `evaluate`.
    """
    result = evaluate(engine, examples[ranks.number :: ranks.count], sampling, **how)
    if ranks.is_alone:
        return result
    parts = [message.value for message in ranks.all_gather_object("the evaluation", attrs.asdict(result))]
    return joined(parts, len(examples))


def joined(parts: Sequence[dict[str, Any]], count: int) -> EvalResult:
    """The results of all ranks, as JSON holds them, in the order of the `count` problems."""

    def column(name: str) -> list[Any]:
        found = [part[name] for part in parts]
        return [found[number % len(parts)][number // len(parts)] for number in range(count)]

    figures = [EpisodeFigures(**each) for each in column("figures")] if parts[0]["figures"] else []
    seconds = max(part["seconds"] for part in parts)
    return EvalResult(seconds, tuple(column("texts")), tuple(column("right")), tuple(figures))


def is_correct(text: str, answer: str) -> bool:
    """Whether the text's last <answer> is the gold one."""
    found = extract_answer(text)
    return found is not None and numbers_equal(found, answer)
