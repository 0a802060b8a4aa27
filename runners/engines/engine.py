"""The protocol for engines: a queue of rows, and the plain values exchanged with it.

A request contains a prompt and one seed per completion. An engine may decode submitted requests in
any order and grouping: a completion depends only on its seed, its prompt and the weights, except
for rounding in batched products. Conversations, rewards and training are built on this protocol.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NewType, Protocol

import attrs

import grpo_fn as g
from grpo_fn.images import PromptImages
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import Tree

DEFAULT_ROWS = 256  # default number of completions that are decoded together
ShouldStop = Callable[[], bool]  # called between decoding steps
# arguments: name of the unit that is counted, number done, total
Advance = Callable[[str, int, int], None]
# a PRNG key: a completion's n-th token is sampled with the key's n-th random bits
Seed = tuple[int, int]
Ticket = NewType("Ticket", int)


def never() -> bool:
    """Returns False: a `ShouldStop` that never stops sampling."""
    return False


def interruptible(should_stop: ShouldStop) -> Callable[[], None] | None:
    """Returns a check for waiting loops that raises Interrupted once `should_stop` returns True.
    For `never`, returns None.
    """

    def check() -> None:
        if should_stop():
            raise Interrupted

    return None if should_stop is never else check


@attrs.frozen(eq=False)
class Weights:
    """The weights that an engine samples with."""

    policy: g.Policy  # the model function that is called with these parameters
    params: Tree
    version: int  # number of the learner's update that produced the weights
    rows: int = 0  # maximum number of completions decoded together; 0 means the engine's own limit


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """A prompt to complete, once per seed. All completions share the prompt's keys and values."""

    prompt: tuple[int, ...]  # token ids
    seeds: tuple[Seed, ...]
    drawn: int = 0  # number of prompt tokens that were sampled earlier with these seeds
    images: PromptImages | None = None  # None means the prompt has no images
    # The next three fields only save time: they avoid computing tokens again.
    keep: bool = False  # whether another request will continue this one
    borrows: bool = False  # whether the engine may copy the kept caches of any other request
    # a kept request with one completion; the prompt starts with its tokens
    continues: Ticket | None = None


Finish = Literal["stop", "length", "cancelled"]


@attrs.frozen(eq=False)
class Row:
    """One sampled completion."""

    tokens: tuple[int, ...]  # sampled tokens, including the token that ends the completion
    logp: tuple[
        float, ...
    ]  # log μ of each token in nats, under the distribution that the token was sampled from
    finish: Finish  # ended by a stop id or stop string, the length limit, or `cancel`
    # pairs (version of the weights, number of tokens that it sampled), in order
    versions: tuple[tuple[int, int], ...]
    entropy: tuple[float, ...] | None = (
        None  # entropy of the sampling distribution at each token in nats, if requested
    )


@attrs.frozen
class Token:
    """One sampled token."""

    id: int
    logp: float  # as in `Row`
    # number of prompt tokens that were computed; the others were cached
    prompt_tokens: int


class Engine(Protocol):
    """Samples completions."""

    @property
    def version(self) -> int:
        """The number of the learner's update that produced the engine's weights."""
        ...

    @property
    def rows(self) -> int:
        """The maximum number of completions decoded together (0 means all). The engine reduces it
        after memory runs out.
        """
        ...

    def load(self, weights: Weights | None) -> None:
        """Switches to these weights for sampling; None frees the current weights.

        Completions in progress finish with the weights that they started with.
        """
        ...

    def submit(self, request: Request, sampling: g.Sampling) -> Ticket:
        """Queues a request, and returns its ticket. The number of completions in `sampling` is
        ignored, because the request contains one seed per completion.

        Raises ValueError, like `grpo_fn.generate`, if the request cannot be sampled.
        """
        ...

    def collect(
        self, least: int = 1, *, should_stop: ShouldStop = never
    ) -> dict[Ticket, tuple[Row, ...]]:
        """Returns the requests completed since the last call, each with its completions in the
        order of the request's seeds.

        Decodes until at least `least` requests are completed, no request is left, or `should_stop`
        returns True. If `least` is 0, decodes for a moment at most.

        If decoding fails, only the requests in progress end. `collect` raises the error once, and
        `peek` raises it for each of these requests until the request is cancelled.
        """
        ...

    def tokens(self, ticket: Ticket, *, should_stop: ShouldStop = never) -> Iterator[Token]:
        """Yields the tokens of a request's first completion as they are sampled; replaces `collect`
        for this request. Ends early if `should_stop` returns True or the caller closes the
        iterator.

        If `should_stop` ended a request with `keep`, the request can be continued from its last
        token.
        """
        ...

    def peek(self, ticket: Ticket, start: int = 0) -> list[Token]:
        """Returns the tokens of a request's first completion so far, from index `start`, without
        decoding.

        Raises the error that ended the request, if there is one.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request. Its tokens so far are collected with the finish "cancelled".

        The request's kept caches are freed, and so are those of the request that it continues.
        """
        ...
