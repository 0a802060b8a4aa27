"""Evaluation: greedy exact match on held-out problems, with the same prompts as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.rollout import FindStop
from grpo_fn.trees import Tree
from runners.data.datasets import epoch_order
from runners.data.prompts import Example
from runners.environments.environments import Environments
from runners.evaluation.episode_figures import SUCCESS, EpisodeFigures
from runners.images.tower import VisionPart
from runners.inference.episode_batches import play_episodes
from runners.inference.text_generation import DEFAULT_ROWS
from runners.inference.tool_conversation import environment_rewards
from runners.machine.launch_modes import launch_keywords
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
    policy: g.Policy,
    params: Tree,
    examples: Sequence[Example],
    *,
    decoder: TextDecoder,
    nudge: str,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    find_stop: FindStop | None = None,
    max_batch: int = 0,
    launch: str = "eval",
    progress: Callable[[int, int], None] | None = None,
    environments: Environments | None = None,
    vision: VisionPart | None = None,
) -> EvalResult:
    """Greedy completions of all examples, compared with the gold answers: numbers as numbers, else as texts.

    `launch` is the config's, after "auto" is resolved. With `environments` each problem is a conversation,
    and the model's last turn is compared. `vision` makes the features of images, if prompts have images.
    `progress(done, total)` is called after each batch of problems.
    """
    started = time.perf_counter()
    rows = max_batch or DEFAULT_ROWS
    texts: list[str] = []
    figures: EpisodeFigures | None = None
    sampling = g.Sampling(max_new_tokens=max_new_tokens, temperature=0, eos_ids=eos_ids, find_stop=find_stop)
    key = mx.random.key(0)  # greedy: never drawn from
    decoding = g.Decoding(**launch_keywords(launch))
    if environments is None:
        for start in range(0, len(examples), rows):
            part = examples[start : start + rows]
            rollout = g.generate(
                policy,
                params,
                [example.tokens for example in part],
                sampling,
                key=key,
                decoding=decoding,
                images=vision.see(part) if vision else None,
            )
            texts += [nudge + decoder.decode(tokens) for tokens in rollout.completions()]
            if progress is not None:
                progress(len(texts), len(examples))
    else:
        figures = EpisodeFigures()
        for episodes in play_episodes(
            environments, policy, params, examples, sampling, key=key, decoding=decoding, rows=rows
        ):
            texts += episodes.texts
            both = zip(episodes.texts, episodes.examples, strict=True)
            right = [is_correct(text, example.answer) for text, example in both]
            own = environment_rewards(environments, episodes.played)
            figures = figures.concatenated(EpisodeFigures.of(episodes, right, own, SUCCESS))
            if progress is not None:
                progress(len(texts), len(examples))
    right = tuple(is_correct(text, example.answer) for text, example in zip(texts, examples, strict=True))
    seconds = time.perf_counter() - started
    return EvalResult(sum(right), len(examples), seconds, tuple(texts), right, figures)


def is_correct(text: str, answer: str) -> bool:
    """Whether the text's last <answer> is the gold one."""
    found = extract_answer(text)
    return found is not None and numbers_equal(found, answer)
