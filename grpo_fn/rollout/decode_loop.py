"""The decode loop: draw a token of each row, store it, drop rows that have ended, take the next step.

It is a generator: whoever drives it gets each step's tokens as a `Column`, and control between the steps.
"""

from collections.abc import Generator
from typing import TypeVar

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled
from grpo_fn.rollout.decode_step import RowBatch
from grpo_fn.rollout.sampling import Sampling, compiled_draw, mark_seen, penalize
from grpo_fn.rollout.turns import Transcript, Turns

COMPACT_SHARE = 0.25  # rows are dropped once this share of them has finished

T = TypeVar("T")


@attrs.frozen(eq=False)
class Column:
    """One decoding step: a token of each row of a batch, possibly still being computed."""

    rows: tuple[int, ...]  # their numbers in the rollout; among them some that ended in the last few steps
    tokens_b: mx.array  # int32
    logp_b: mx.array  # float32


Columns = Generator[Column | None, None, T]  # gives None after a piece of a prefill, and while it waits


@attrs.frozen
class Decoding:
    """How completions are decoded. It affects only speed and memory; the numbers are the same, to rounding.

    Attributes:
        max_batch: the most rows decoded together; 0: all. Whole groups, at least one.
        check_every: steps between checks which rows have ended; a check waits for the device.
        pipelined: submit each step to the device without waiting for the last (hides launch time on a GPU;
            costs a copy of the cache).
        share_prefix: keep a prompt's keys and values once for all its completions, if the model can; None:
            on CPU and CUDA.
        turns_together: in conversations, begin a turn when no row decodes any more and all replies are there:
            the same numbers bit for bit each time. False: begin as soon as a reply is there, so that a slow
            reply delays no other row; then the rounding of the numbers depends on timing.
    """

    max_batch: int = 0
    check_every: int = 8
    pipelined: bool = False
    share_prefix: bool | None = None
    turns_together: bool = True


class Decoder:
    """The decode loop of one part, with its settings."""

    def __init__(self, sampling: Sampling, decoding: Decoding) -> None:
        self._sampling, self._draw = sampling, compiled_draw(sampling)
        self._check_every = max(decoding.check_every, 1)
        self._launch = mx.async_eval if decoding.pipelined else mx.eval
        self._compact = enabled("row_compaction")

    def run(
        self, batches: list[RowBatch], transcript: Transcript, turns: Turns | None = None
    ) -> Columns[None]:
        """Decode until every row has ended; with `turns`, until every conversation has."""
        steps = 0
        while batches:
            for batch in batches:
                batch.drawn.append(self._drawn(batch, batch.count))
                batch.count += 1
            self._launch([batch.drawn[-1] for batch in batches])
            steps += 1
            tokens = [batch.drawn[-1]["tokens"] for batch in batches]
            for batch in batches:
                yield Column(tuple(batch.rows), batch.drawn[-1]["tokens"], batch.drawn[-1]["logp"])
            look = steps % self._check_every == 0 or any(batch.is_full for batch in batches)
            if look or (turns is not None and turns.sees_each_step):
                for batch in batches:
                    self._collect(batch, transcript, turns)
            for batch, token_b in zip(batches, tokens, strict=True):
                if batch.alive and not batch.is_full:
                    places = self._places_to_keep(batch) if look else None
                    if places is not None:
                        batch.keep_rows(places)
                        token_b = token_b[mx.array(places)]
                    batch.logits_bv = batch.steps(token_b)
            batches = [batch for batch in batches if batch.alive and not batch.is_full]
            if turns is not None and (look or not batches):
                joined = yield from turns.resumed(decoding=bool(batches))
                while not batches and not joined and turns.waiting:
                    joined = yield from turns.resumed(decoding=False)
                batches += joined

    def _drawn(self, batch: RowBatch, n: int) -> dict[str, mx.array]:
        """The n-th token of each row."""
        if batch.seen_bv is not None:
            batch.logits_bv = penalize(batch.logits_bv, batch.seen_bv, self._sampling.repetition_penalty)
        drawn = self._draw(batch.logits_bv, batch.bits_nbw[n])
        if batch.seen_bv is not None:
            batch.seen_bv = mark_seen(batch.seen_bv, drawn["tokens"])
        return drawn

    def _places_to_keep(self, batch: RowBatch) -> list[int] | None:
        """Places of the rows to keep, if enough rows have ended; None: all."""
        if not (self._compact and batch.steps.drops_rows):
            return None
        places = [place for place, row in enumerate(batch.rows) if row in batch.alive]
        return places if len(places) <= (1 - COMPACT_SHARE) * len(batch.rows) else None

    def _collect(self, batch: RowBatch, transcript: Transcript, turns: Turns | None) -> None:
        """Store the batch's tokens since the last check, and find the rows that go on."""
        start = batch.count - len(batch.drawn)
        transcript.store(batch)
        ends = []
        for place, row in enumerate(batch.rows):
            if row not in batch.alive:
                continue
            text = transcript.rows[row].last_turn
            room = None if turns is None else turns.room(row)
            end = self._sampling.end_of(text[:room], start)
            if end is not None:
                batch.alive.remove(row)
                transcript.end(row, end, True)
                ends.append((place, row, end))
            elif room is not None and len(text) >= room:
                batch.alive.remove(row)
                transcript.end(row, room, False)
        if turns is not None and ends:
            turns.ended(batch, ends)
