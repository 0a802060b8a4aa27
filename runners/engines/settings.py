"""What engines take, from a run's config and examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpo_fn as g
from grpo_fn.rollout import FindStop
from runners.engines.engine import Requests

if TYPE_CHECKING:
    from runners.config.loading import Config
    from runners.data.prompts import Example
    from runners.images.tower import VisionPart
    from runners.machine.startup import Platform


DEFAULT_ROWS = 256  # completions sampled at a time by default


def sampling_of(config: Config, eos_ids: Iterable[int], find_stop: FindStop | None) -> g.Sampling:
    """How a run samples its completions."""
    rollout = config.rollout
    return g.Sampling(
        num_generations=rollout.num_generations,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        eos_ids=eos_ids,
        find_stop=find_stop,
        with_entropy=config.loss.top_entropy_quantile < 1,
    )


def decoding_of(config: Config) -> g.Decoding:
    """How a run decodes; its rollout.launch and max_batch are resolved."""
    rollout = config.rollout
    return launched(
        rollout.launch,
        max_batch=rollout.max_batch,
        check_every=rollout.check_every,
        turns_together=config.env.schedule == "together",
    )


def requests_of(
    examples: Sequence[Example], numbers: Sequence[int] | None = None, vision: VisionPart | None = None
) -> Requests:
    """The prompts of examples, with the features of their images if the model has a vision part."""
    return Requests(
        prompts=[example.tokens for example in examples],
        numbers=numbers,
        images=vision.see(examples) if vision else None,
    )


def usual_launch(platform: Platform) -> str:
    """What rollout.launch = "auto" is: a CPU has no launch time to hide, and pipelining copies caches."""
    return "eval" if platform.backend == "cpu" else "async"


def launched(launch: str, **options: Any) -> g.Decoding:
    """`Decoding` with a launch of steps: "eval" waits for each, "async" submits it and prepares the next."""
    return g.Decoding(pipelined=launch == "async", **options)
