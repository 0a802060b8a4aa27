"""Derives the sampling and decoding settings from a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpo_fn as g

if TYPE_CHECKING:
    from runners.config.loading import Config
    from runners.machine.startup import Platform


def sampling_of(config: Config, eos_ids: Iterable[int]) -> g.Sampling:
    """Returns a run's sampling settings."""
    rollout = config.rollout
    return g.Sampling(
        num_generations=rollout.num_generations,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        eos_ids=eos_ids,
        stop=rollout.stop,
        with_entropy=config.loss.top_entropy_quantile < 1,
    )


def decoding_of(config: Config) -> g.Decoding:
    """Returns a run's decoding settings, after resolving rollout.launch and max_batch."""
    rollout = config.rollout
    return g.Decoding(
        pipelined=rollout.launch == "async",
        max_batch=rollout.max_batch,
        check_every=rollout.check_every,
    )


def usual_launch(platform: Platform) -> str:
    """Returns the launch mode that rollout.launch = "auto" stands for. A CPU has no launch time to
    hide, and pipelining copies caches.
    """
    return "eval" if platform.backend == "cpu" else "async"
