"""The decode loop: draw a token of each row, store it, drop rows that have ended, take the next step.

It is a generator: whoever drives it gets each step's tokens as a `Column`, and control between the steps.
"""

from collections.abc import Generator

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled
from grpo_fn.rollout.decode_step import RowBatch, T
from grpo_fn.rollout.sampling import Sampling, compiled_draw, mark_seen, penalize
from grpo_fn.rollout.turns import Transcript, Turns

COMPACT_SHARE = 0.25  # rows are dropped once this share of them has finished


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


def decode_rows(
    batches: list[RowBatch],
    transcript: Transcript,
    sampling: Sampling,
    decoding: Decoding,
    turns: Turns | None = None,
) -> Columns[None]:
    """The decode loop of one part: until every row has ended; with `turns`, until every conversation has."""
    draw, steps = compiled_draw(sampling), 0
    while batches:
        for batch in batches:
            if batch.seen_bv is not None:
                batch.logits_bv = penalize(batch.logits_bv, batch.seen_bv, sampling.repetition_penalty)
            batch.drawn.append(draw(batch.logits_bv, batch.bits_nbw[batch.count]))
            if batch.seen_bv is not None:
                batch.seen_bv = mark_seen(batch.seen_bv, batch.drawn[-1]["tokens"])
            batch.count += 1
        (mx.async_eval if decoding.pipelined else mx.eval)([batch.drawn[-1] for batch in batches])
        steps += 1
        tokens = [batch.drawn[-1]["tokens"] for batch in batches]
        for batch in batches:
            yield Column(tuple(batch.rows), batch.drawn[-1]["tokens"], batch.drawn[-1]["logp"])
        look = steps % max(decoding.check_every, 1) == 0 or any(batch.is_full for batch in batches)
        if look or (turns is not None and turns.extender.sees_each_step):
            for batch in batches:
                _collect(batch, transcript, sampling, turns)
        for batch, token_b in zip(batches, tokens, strict=True):
            if batch.alive and not batch.is_full:
                if look and compacts(batch):
                    places = [place for place, row in enumerate(batch.rows) if row in batch.alive]
                    batch.keep_rows(places)
                    token_b = token_b[mx.array(places)]
                batch.logits_bv = batch.steps(token_b)
        batches = [batch for batch in batches if batch.alive and not batch.is_full]
        if turns is not None and (look or not batches):
            joined = yield from turns.resumed(decoding=bool(batches))
            while not batches and not joined and turns.waiting:
                joined = yield from turns.resumed(decoding=False)
            batches += joined


def compacts(batch: RowBatch) -> bool:
    """Whether the rows that have ended leave the batch: enough of them have."""
    droppable = enabled("row_compaction") and batch.steps.drops_rows
    return droppable and len(batch.alive) <= (1 - COMPACT_SHARE) * len(batch.rows)


def _collect(batch: RowBatch, transcript: Transcript, sampling: Sampling, turns: Turns | None) -> None:
    """Store the batch's tokens since the last check, and find the rows that go on."""
    start = batch.count - len(batch.drawn)
    transcript.store(batch)
    ends = []
    for place, row in enumerate(batch.rows):
        if row not in batch.alive:
            continue
        text = transcript.rows[row].last_turn
        room = None if turns is None else turns.room(row)
        end = sampling.end_of(text[:room], start)
        if end is not None:
            batch.alive.remove(row)
            transcript.end(row, end, True)
            ends.append((place, row, end))
        elif room is not None and len(text) >= room:
            batch.alive.remove(row)
            transcript.end(row, room, False)
    if turns is not None and ends:
        turns.ended(batch, ends)
