"""Evaluation: greedy exact match on held-out problems, with the same prompts as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import mlx.core as mx

import grpo_fn as g
from runners.data.datasets import epoch_order
from runners.data.prompts import Example
from runners.engines.engine import Samples
from runners.environments.environments import Environments
from runners.evaluation.episode_figures import SUCCESS, EpisodeFigures
from runners.images.tower import VisionPart
from runners.inference.batches import sample_batches
from runners.rewards.builtin import extract_answer, numbers_equal
from runners.tokenization.text import TextDecoder

_Item = TypeVar("_Item")


@attrs.frozen
class EvalResult:
    """Exact match over some problems."""

    correct: int
    total: int
    seconds: float
    texts: tuple[str, ...]  # the model's texts, with the nudge in front
    right: tuple[bool, ...] = ()  # whether each text's answer is the gold one
    figures: EpisodeFigures | None = None  # of conversations with tools

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
    progress: Callable[[int, int], None] | None = None,
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
        progress: `progress(done, total)` is called after each batch of problems.
        environments: with them each problem is a conversation, and the model's last turn is compared.
        vision: makes the features of images, if prompts have images.
    """
    started = time.perf_counter()
    texts: list[str] = []
    figures = None if environments is None else EpisodeFigures()
    found = sample_batches(
        engine,
        examples,
        attrs.evolve(sampling, num_generations=1, temperature=0, with_entropy=False),
        key=mx.random.key(0),  # greedy: nothing is drawn
        decoder=decoder,
        nudge=nudge,
        rows=max_batch,
        environments=environments,
        vision=vision,
    )
    for batch in found:
        texts += batch.texts
        if environments is not None and figures is not None and batch.played is not None:
            both = zip(batch.texts, batch.examples, strict=True)
            right = [is_correct(text, example.answer) for text, example in both]
            own = environments.own_rewards(batch.played)
            figures = figures.concatenated(EpisodeFigures.of(batch.played, right, own, SUCCESS))
        if progress is not None:
            progress(len(texts), len(examples))
    right = tuple(is_correct(text, example.answer) for text, example in zip(texts, examples, strict=True))
    seconds = time.perf_counter() - started
    return EvalResult(sum(right), len(examples), seconds, tuple(texts), right, figures)


def is_correct(text: str, answer: str) -> bool:
    """Whether the text's last <answer> is the gold one."""
    found = extract_answer(text)
    return found is not None and numbers_equal(found, answer)
