"""Samples rollouts with any engine: completions of prompts, and conversations with external
replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.images import PromptImages
from grpo_fn.prng import completion_keys
from grpo_fn.rollout import Ended, Interrupted, Replies, rollout_of
from grpo_fn.trees import flat, on_host
from runners.engines.engine import Engine, Finish, Request, Row, Seed, ShouldStop, Ticket, never
from runners.errors import UserError

if TYPE_CHECKING:
    from runners.images.tower import VisionPart


class Cancelled(Exception):
    """Raised if `should_stop` ended the sampling. The results are discarded, except by callers that
    show partial results.
    """

    def __init__(self, rollout: g.Rollout) -> None:
        """Stores the tokens sampled so far as a `rollout`, whose rows may be empty."""
        super().__init__("the sampling was interrupted")
        self.rollout = rollout


class Prompt(Protocol):
    """An object with a prompt to complete, such as an `Example`."""

    @property
    def tokens(self) -> tuple[int, ...]: ...


def requests_of(
    prompts: Sequence[Prompt],
    sampling: g.Sampling,
    key: mx.array,
    numbers: Sequence[int] | None = None,
    vision: VisionPart | None = None,
) -> list[Request]:
    """Returns one request per prompt, for G completions each. Completion g of prompt n uses the
    random stream (key, n, g).

    `numbers` contains each prompt's number n; None means 0, 1, 2, … If `vision` is given, prompts
    may have images.
    """
    images = vision.see(prompts) if vision else None
    seeds = seeds_of(key, numbers or range(len(prompts)), sampling)
    return [
        Request(prompt=each.tokens, seeds=seeds[p], images=None if images is None else images[p])
        for p, each in enumerate(prompts)
    ]


def seeds_of(key: mx.array, numbers: Sequence[int], sampling: g.Sampling) -> list[tuple[Seed, ...]]:
    """Derives the seeds for G completions of each of these prompts."""
    size = sampling.num_generations
    if not numbers:
        return []
    prompt_n = mx.repeat(mx.array(list(numbers), mx.uint32), size)
    first = sampling.first_generation
    generation_n = mx.tile(mx.arange(first, first + size), len(numbers))
    keys = list(map(tuple, on_host(completion_keys(key, prompt_n, generation_n))))
    return [tuple(keys[start : start + size]) for start in range(0, len(keys), size)]


def generate(
    engine: Engine,
    requests: Sequence[Request],
    sampling: g.Sampling,
    *,
    should_stop: ShouldStop = never,
) -> g.Rollout:
    """Samples the completions for requests with G seeds each.

    Raises Cancelled if `should_stop` ended the sampling, and the ValueErrors of `grpo_fn.generate`.
    """
    tickets: list[Ticket] = []
    rows: dict[Ticket, tuple[Row, ...]] = {}
    try:
        for request in requests:
            tickets.append(engine.submit(request, sampling))
        while len(rows) < len(tickets) and not should_stop():
            rows |= engine.collect(len(tickets) - len(rows), should_stop=should_stop)
    finally:
        left = [ticket for ticket in tickets if ticket not in rows]
        for ticket in left:
            engine.cancel(ticket)
        rows |= engine.collect(len(left)) if left else {}
    whole = flat(rows[ticket] for ticket in tickets)
    rollout = _rollout(
        [request.prompt for request in requests],
        sampling.num_generations,
        whole,
        [request.images for request in requests],
        with_entropy=sampling.with_entropy,
    )
    if left:
        raise Cancelled(rollout)
    return rollout


def _rollout(
    prompts: Sequence[tuple[int, ...]],
    size: int,
    rows: Sequence[Row | Talk],
    images: Sequence[PromptImages | None],
    *,
    with_entropy: bool,
) -> g.Rollout:
    """Combines rows into a rollout, `size` rows per prompt. The rollout also contains the oldest
    version of the weights that sampled each row.
    """
    ended = [
        Ended(
            tokens=list(row.tokens),
            logp=list(row.logp),
            entropy=list(row.entropy or ()) if with_entropy else None,
            finished=row.finish == "stop",
        )
        for row in rows
    ]
    versions = [min((version for version, _ in row.versions), default=0) for row in rows]
    return rollout_of(
        prompts,
        size,
        ended,
        vocabulary=1
        + max(map(max, [*prompts, *(row.tokens for row in rows if row.tokens)]), default=0),
        images=images if any(each is not None for each in images) else None,
        sampled=[row.sampled for row in rows if isinstance(row, Talk)] or None,
        version_b=mx.array(versions, mx.int32),
    )


@attrs.define(eq=False)
class Talk:
    """One row: sampled turns, and the given tokens between them."""

    prompt: tuple[int, ...]
    seed: Seed
    tokens: list[int] = attrs.field(factory=list)
    sampled: list[bool] = attrs.field(factory=list)
    logp: list[float] = attrs.field(factory=list)
    entropy: list[float] = attrs.field(factory=list)
    versions: list[tuple[int, int]] = attrs.field(factory=list)
    finish: Finish = "length"

    def sample(self, row: Row) -> None:
        """Appends a sampled turn."""
        self._append(row, [True] * len(row.tokens))

    def give(self, tokens: Sequence[int]) -> None:
        """Appends tokens that were not sampled."""
        zeros = (0.0,) * len(tokens)
        self._append(Row(tuple(tokens), zeros, "length", (), zeros), [False] * len(tokens))

    def after(self, head: Sequence[int]) -> Talk:
        """Returns a copy of the row whose completion starts with `head`: given tokens that the
        rollout no longer counts as prompt.
        """
        row = Talk(self.prompt, self.seed)
        row.give(head)
        row._append(self, self.sampled)
        return row

    def _append(self, row: Row | Talk, sampled: Iterable[bool]) -> None:
        self.tokens += row.tokens
        self.sampled += sampled
        self.logp += row.logp
        self.entropy += row.entropy or ()
        self.versions += row.versions
        self.finish = row.finish


def turn_starts(sampled: Sequence[bool]) -> list[int]:
    """Returns the index of each sampled turn's first token."""
    return [n for n, own in enumerate(sampled) if own and not (n and sampled[n - 1])]


def converse(
    engine: Engine,
    requests: Sequence[Request],
    sampling: g.Sampling,
    replies: Replies,
    *,
    together: bool = True,
    should_stop: ShouldStop = never,
) -> g.Rollout:
    """Samples conversations. After a finished turn, the tokens of a reply may be appended, and the
    model then samples another turn.

    Args:
        engine, sampling: as for `generate`; `max_new_tokens` limits a conversation, including given
            tokens.
        requests: requests with one seed each, in groups of G. If a prompt is longer than the
            group's common prefix, the rest becomes the start of its completion, as given tokens.
        replies: computes replies to turns. Rows are numbered like the requests.
        together: if True, turns start only when no row is decoding and all replies have arrived, so
            results are bit-identical across runs. If False, a turn starts as soon as its reply has
            arrived, so a slow reply does not delay other rows.

    Raises Cancelled if `should_stop` ended the sampling, and the ValueErrors of `grpo_fn.generate`.
    """
    talks = [Talk(request.prompt, request.seeds[0]) for request in requests]
    decoding: dict[Ticket, int] = {}
    waiting: set[int] = set()
    held: dict[int, Ticket] = {}  # each row's turn that is decoding or may be continued

    def take_turn(row: int) -> None:
        talk = talks[row]
        request = Request(
            prompt=(*talk.prompt, *talk.tokens),
            seeds=(talk.seed,),
            drawn=sum(talk.sampled),
            keep=True,
            continues=held.get(row),
        )
        room = sampling.max_new_tokens - len(talk.tokens)
        turn_sampling = attrs.evolve(sampling, num_generations=1, max_new_tokens=room)
        held[row] = engine.submit(request, turn_sampling)
        decoding[held[row]] = row

    def end(row: int) -> None:
        engine.cancel(held.pop(row))

    def hear(ticket: Ticket, turn: Row) -> None:
        row = decoding.pop(ticket)
        talk = talks[row]
        talk.sample(turn)
        goes_on = turn.finish == "stop" and len(talk.tokens) < sampling.max_new_tokens
        if goes_on and turn.tokens and replies.begin(row, turn.tokens):
            waiting.add(row)
        else:
            end(row)

    def answer(row: int, tokens: Sequence[int] | None) -> None:
        waiting.remove(row)
        talk = talks[row]
        room = sampling.max_new_tokens - len(talk.tokens)
        if tokens is not None and len(tokens) < room:
            talk.give(tokens)
            take_turn(row)
        else:  # no reply, or no room for the model's answer to the reply
            talk.finish = talk.finish if tokens is None else "length"
            end(row)

    try:
        for row in range(len(talks)):
            take_turn(row)
        while (decoding or waiting) and not should_stop():
            if decoding:
                least = 0 if waiting and not together else 1
                turns = engine.collect(least, should_stop=should_stop)
                for ticket, (turn,) in sorted(turns.items(), key=lambda item: decoding[item[0]]):
                    hear(ticket, turn)
            if waiting and not (together and decoding):
                least = len(waiting) if together else int(not decoding)
                found = replies.collect(least)
                if not found.keys() <= waiting or len(found) < least:
                    raise ValueError(
                        f"replies arrived for rows {sorted(found)}: expected at least {least} of "
                        f"the rows {sorted(waiting)}"
                    )
                for row in sorted(found):
                    answer(row, found[row])
    except Interrupted:  # raised by `replies`, which also checks `should_stop`
        pass
    finally:
        for ticket in held.values():
            engine.cancel(ticket)
        for ticket, (turn,) in engine.collect(len(decoding)).items() if decoding else ():
            talks[decoding[ticket]].sample(turn)
    rollout = grouped(talks, sampling.num_generations, with_entropy=sampling.with_entropy)
    if held:
        raise Cancelled(rollout)
    return rollout


def grouped(talks: Sequence[Talk], size: int, *, with_entropy: bool) -> g.Rollout:
    """Combines rows into a rollout with groups of `size` rows. A group's prompt is the common
    prefix of its rows' prompts.
    """
    prompts: list[tuple[int, ...]] = []
    rows: list[Talk] = []
    for start in range(0, len(talks), size):
        group = talks[start : start + size]
        columns = zip(*(talk.prompt for talk in group), strict=False)
        shared = [*itertools.takewhile(lambda tokens: len(set(tokens)) == 1, columns)]
        if not shared:
            raise UserError("the prompts of a group do not start with the same token")
        prompts.append(group[0].prompt[: len(shared)])
        rows += [talk.after(talk.prompt[len(shared) :]) for talk in group]
    return _rollout(prompts, size, rows, [None] * len(prompts), with_entropy=with_entropy)
