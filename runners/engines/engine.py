"""The protocol of engines: weights in; completions, or one completion as a stream, out. What they take from a
config and examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.images import PromptImages
from grpo_fn.rollout import FindStop, Interrupted, Replies
from grpo_fn.trees import Tree

if TYPE_CHECKING:
    from runners.config.loading import Config
    from runners.data.prompts import Example
    from runners.images.tower import VisionPart
    from runners.machine.startup import Platform

DEFAULT_ROWS = 256  # completions sampled at a time by default
ShouldStop = Callable[[], bool]  # asked between the steps of decoding
Advance = Callable[[str, int, int], None]  # takes what is counted, how many are done, and how many there are


def never() -> bool:
    """`ShouldStop` of sampling that nothing interrupts."""
    return False


def interruptible(should_stop: ShouldStop) -> Callable[[], None] | None:
    """A function for whatever waits: it raises Interrupted once `should_stop` says so; None for `never`."""

    def check() -> None:
        if should_stop():
            raise Interrupted

    return None if should_stop is never else check


@attrs.frozen(eq=False, kw_only=True)
class Requests:
    """Prompts to complete, as tokens."""

    prompts: Sequence[Sequence[int]]
    numbers: Sequence[int] | None = None  # of the prompts, for their random keys; None: 0, 1, 2, …
    images: Sequence[PromptImages | None] | None = None  # of each prompt; None: no prompt has any
    replies: Replies | None = None  # answers turns; None: each completion is one turn


@attrs.frozen
class Token:
    """A sampled token."""

    id: int
    logp: float  # under the distribution that it was drawn from, nats
    prompt_tokens: int  # tokens of its prompt that were computed; the others' keys and values were kept


class Cancelled(Exception):
    """`should_stop` has ended the sampling. Nothing of it counts, except for those who show parts of it."""

    def __init__(self, rollout: g.Rollout) -> None:
        """`rollout`: what had been sampled; its rows may be empty."""
        super().__init__("the sampling was interrupted")
        self.rollout = rollout


class Restart(Exception):
    """The engine has given up its weights for better ones: conversations have to begin again with `reset`."""


class Samples(Protocol):
    """Whatever completes prompts."""

    def generate(
        self, requests: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> g.Rollout:
        """Completions of all prompts, with `version_b`.

        Raises Cancelled if `should_stop` ended it, Restart if it fell back amid conversations.
        """
        ...


class Engine(Samples, Protocol):
    """Something that samples."""

    @property
    def version(self) -> int:
        """The number of the learner's update that made its weights."""
        ...

    def load(self, params: Tree, version: int) -> None:
        """Sample with these parameters of the learner from now on; None frees those that it has."""
        ...

    def stream(
        self, request: Requests, sampling: g.Sampling, *, key: mx.array, should_stop: ShouldStop = never
    ) -> Iterator[Token]:
        """The first completion of one prompt, token by token, including the one that ends it.

        It ends early if `should_stop` says so, or when the caller closes it.
        """
        ...


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
    return g.Decoding(
        pipelined=rollout.launch == "async",
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
