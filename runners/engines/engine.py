"""The protocol of engines: a queue of rows, and the plain values that are exchanged with it.

A request is a prompt and a seed for each of its completions. An engine decodes submitted requests
in any order and grouping: a completion depends only on its seed, its prompt and the weights, up to
the rounding of batched products. Conversations, rewards and training are built on top of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NewType, Protocol

import attrs

import grpo_fn as g
from grpo_fn.images import PromptImages
from grpo_fn.rollout import Interrupted
from grpo_fn.trees import Tree

DEFAULT_ROWS = 256  # completions sampled at a time by default
ShouldStop = Callable[[], bool]  # asked between the steps of decoding
# takes what is counted, how many are done, and how many there are
Advance = Callable[[str, int, int], None]
# a PRNG key: the n-th token of a completion is drawn with its n-th random bits
Seed = tuple[int, int]
Ticket = NewType("Ticket", int)


def never() -> bool:
    """A `ShouldStop` that never stops sampling."""
    return False


def interruptible(should_stop: ShouldStop) -> Callable[[], None] | None:
    """A function for waiting loops: it raises Interrupted once `should_stop` returns True; None for
    `never`."""

    def check() -> None:
        if should_stop():
            raise Interrupted

    return None if should_stop is never else check


@attrs.frozen(eq=False)
class Weights:
    """The weights that an engine samples with."""

    policy: g.Policy  # the function of these parameters
    params: Tree
    version: int  # the learner's update that made them
    rows: int = 0  # the most completions to decode together with them; 0: the engine's own bound


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """A prompt to complete, once for each seed; all completions share the prompt's keys and
    values."""

    prompt: tuple[int, ...]  # token ids
    seeds: tuple[Seed, ...]
    drawn: int = 0  # tokens of the prompt that were sampled with these seeds before
    images: PromptImages | None = None  # None: the prompt has none
    # The next three only save time: a request that continues another one computes no token twice.
    keep: bool = False  # whether another request will continue this one
    borrows: bool = False  # whether what was kept of any request may be used, for a copy
    # a kept request of one completion, with whose tokens the prompt begins
    continues: Ticket | None = None


Finish = Literal["stop", "length", "cancelled"]


@attrs.frozen(eq=False)
class Row:
    """A completion."""

    tokens: tuple[int, ...]  # the one that ends it included
    logp: tuple[float, ...]  # log μ of each, nats, under the distribution that it was drawn from
    finish: Finish  # by a stop id or a stop string, at the length limit, or by `cancel`
    # (version of the weights, tokens drawn with them), in order
    versions: tuple[tuple[int, int], ...]
    entropy: tuple[float, ...] | None = None  # of the sampler at each token, nats, if asked for


@attrs.frozen
class Token:
    """A sampled token."""

    id: int
    logp: float  # as in `Row`
    # tokens of its prompt that were computed; the others' keys and values were kept
    prompt_tokens: int


@attrs.frozen
class Traits:
    """Properties of an engine's rows."""

    # whether log-probs are of the distribution drawn from: temperature, top-p and so on
    drawn_logp: bool
    entropy: bool
    images: bool  # whether prompts may have images


class Engine(Protocol):
    """Something that samples."""

    @property
    def traits(self) -> Traits:
        """What its rows have."""
        ...

    @property
    def version(self) -> int:
        """The learner's update that produced its weights."""
        ...

    @property
    def rows(self) -> int:
        """The most completions that it decodes together (0: all), reduced after it ran out of
        memory."""
        ...

    def load(self, weights: Weights | None) -> None:
        """Samples with these weights from now on; None frees the current ones.

        Completions in progress finish with the weights that they started with.
        """
        ...

    def submit(self, request: Request, sampling: g.Sampling) -> Ticket:
        """Queue a request. Of `sampling`, the number of completions is not read: the request has a
        seed for each.

        Raises ValueError for a request that cannot be sampled, as `grpo_fn.generate` does.
        """
        ...

    def collect(
        self, least: int = 1, *, should_stop: ShouldStop = never
    ) -> dict[Ticket, tuple[Row, ...]]:
        """The requests completed since the last call, in the order of their seeds.

        Works until there are at least `least`, or nothing is left, or `should_stop` says so; with 0
        for a moment at most.

        If decoding fails, the error ends the requests that were under way, and no others: it is
        raised once, and `peek` raises it for each of them until it is cancelled.
        """
        ...

    def tokens(self, ticket: Ticket, *, should_stop: ShouldStop = never) -> Iterator[Token]:
        """The tokens of a request's first completion as they come, in place of `collect`;
        `should_stop` ends it early, as does a caller that closes it.

        A request to keep that `should_stop` ends can be continued from the last token.
        """
        ...

    def peek(self, ticket: Ticket, start: int = 0) -> list[Token]:
        """The tokens of a request's first completion so far, from number `start` on; it decodes
        nothing.

        Raises the error that has ended the request.
        """
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request: its tokens so far are collected as "cancelled".

        Frees its kept caches, and those of the request that it continues.
        """
        ...
