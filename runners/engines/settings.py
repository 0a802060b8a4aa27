"""A config's settings for sampling: the distribution and the decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpo_fn as g

if TYPE_CHECKING:
    from runners.config.loading import Config
    from runners.machine.startup import Platform


def sampling_of(config: Config, eos_ids: Iterable[int]) -> g.Sampling:
    """The sampling settings of a run."""
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
    """The decoding settings of a run, with rollout.launch and max_batch resolved."""
    rollout = config.rollout
    return g.Decoding(
        pipelined=rollout.launch == "async",
        max_batch=rollout.max_batch,
        check_every=rollout.check_every,
    )


def usual_launch(platform: Platform) -> str:
    """The meaning of rollout.launch = "auto". On a CPU, there is no launch time to hide, and
    pipelining copies caches.
    """
    return "eval" if platform.backend == "cpu" else "async"
