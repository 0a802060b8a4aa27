"""The protocol of engines: a queue of rows, and the plain values that are exchanged with it.

A request is a prompt and a seed for each of its completions. An engine decodes submitted requests
in any order and grouping: a completion depends only on its seed, its prompt and the weights, up to
the rounding of batched products. Conversations, rewards and training are built on top of it.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NewType, Protocol

import attrs

import grpo_fn as g
from grpo_fn.images import PromptImages
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import Tree

DEFAULT_ROWS = 256  # completions sampled at a time by default
ShouldStop = Callable[[], bool]  # called between decoding steps
# arguments: what is counted, how many are done, and the total
Advance = Callable[[str, int, int], None]
# a PRNG key: the n-th token of a completion is drawn with its n-th random bits
Seed = tuple[int, int]
Ticket = NewType("Ticket", int)


def never() -> bool:
    """A `ShouldStop` that never stops sampling."""
    return False


def interruptible(should_stop: ShouldStop) -> Callable[[], None] | None:
    """A function for waiting loops that raises Interrupted once `should_stop` returns True; None
    for `never`.
    """

    def check() -> None:
        if should_stop():
            raise Interrupted

    return None if should_stop is never else check


@attrs.frozen(eq=False)
class Weights:
    """The weights that an engine samples with."""

    policy: g.Policy  # the function that uses these parameters
    params: Tree
    version: int  # the learner's update that produced them
    rows: int = 0  # maximum number of completions decoded together; 0: the engine's own limit


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """A prompt to complete, once for each seed; all completions share the prompt's keys and
    values."""

    prompt: tuple[int, ...]  # token ids
    seeds: tuple[Seed, ...]
    drawn: int = 0  # tokens of the prompt that were sampled with these seeds before
    images: PromptImages | None = None  # None: the prompt has none
    # The next three fields only save time: no token is computed twice.
    keep: bool = False  # whether another request will continue this one
    borrows: bool = False  # whether the kept caches of any request may be copied
    # a kept request with one completion, whose tokens start the prompt
    continues: Ticket | None = None


Finish = Literal["stop", "length", "cancelled"]


@attrs.frozen(eq=False)
class Row:
    """A completion."""

    tokens: tuple[int, ...]  # including the one that ends it
    logp: tuple[
        float, ...
    ]  # log μ of each token in nats, under the distribution that was sampled from
    finish: Finish  # by a stop id or a stop string, at the length limit, or by `cancel`
    # pairs (version of the weights, number of tokens sampled with them), in order
    versions: tuple[tuple[int, int], ...]
    entropy: tuple[float, ...] | None = (
        None  # the sampler's entropy at each token in nats, if requested
    )


@attrs.frozen
class Token:
    """A sampled token."""

    id: int
    logp: float  # as in `Row`
    # number of computed prompt tokens; the others were in kept caches
    prompt_tokens: int


class Engine(Protocol):
    """Samples completions."""

    @property
    def version(self) -> int:
        """The learner's update that produced the engine's weights."""
        ...

    @property
    def rows(self) -> int:
        """The maximum number of completions that are decoded together (0: all); it is reduced after
        memory runs out.
        """
        ...

    def load(self, weights: Weights | None) -> None:
        """Samples with these weights from now on; None frees the current ones.

        Completions in progress finish with the weights that they started with.
        """
        ...

    def submit(self, request: Request, sampling: g.Sampling) -> Ticket:
        """Queues a request. The number of completions in `sampling` is ignored, because the request
        contains a seed for each.

        Raises ValueError, like `grpo_fn.generate`, for a request that cannot be sampled.
        """
        ...

    def collect(
        self, least: int = 1, *, should_stop: ShouldStop = never
    ) -> dict[Ticket, tuple[Row, ...]]:
        """The requests completed since the last call, in the order of their seeds.

        Works until at least `least` requests are completed, none is left, or `should_stop` returns
        True; if `least` is 0, at most for a moment.

        If decoding fails, the error ends only the requests in progress. It is raised once, and
        `peek` raises it for each of them until it is cancelled.
        """
        ...

    def tokens(self, ticket: Ticket, *, should_stop: ShouldStop = never) -> Iterator[Token]:
        """Yields the tokens of a request's first completion as they are sampled, instead of
        `collect`. It ends early if `should_stop` returns True or the caller closes it.

        If `should_stop` ended a request that is kept, it can be continued from the last token.
        """
        ...

    def peek(self, ticket: Ticket, start: int = 0) -> list[Token]:
        """The tokens of a request's first completion so far, from index `start`; does not decode.

        Raises the error that has ended the request.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request; its tokens so far are collected as "cancelled".

        Frees its kept caches, and those of the request that it continues.
        """
        ...
