"""The decode loop: draw a token of each row, store it, drop rows that have ended, take the next step.

It is a generator: whoever drives it gets each step's tokens as a `Column`, and control between the steps.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled
from grpo_fn.completions import Rollout
from grpo_fn.rollout.row_batch import RowBatch
from grpo_fn.rollout.sampling import Sampling, compiled_draw, mark_seen, penalize
from grpo_fn.rollout.turns import Transcript, Turns
from grpo_fn.trees import on_host

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


@attrs.define(eq=False)
class Completions:
    """What has been sampled so far of all rows, in full size."""

    drawn: dict[str, mx.array]  # "tokens" int32, "logp" and, if asked for, "entropy": [B,T]
    lengths: list[int]  # tokens of each row that count
    finished: list[bool]  # as `Rollout.finished_b`

    @classmethod
    def empty(cls, rows: int, sampling: Sampling) -> "Completions":
        """Nothing sampled: each row of zeros, unfinished."""
        shape = rows, sampling.max_new_tokens
        drawn = {"tokens": mx.zeros(shape, mx.int32), "logp": mx.zeros(shape)}
        if sampling.with_entropy:
            drawn["entropy"] = mx.zeros(shape)
        return cls(drawn, [0] * rows, [False] * rows)

    def store(self, batch: RowBatch, stacked: dict[str, mx.array], start: int) -> None:
        """The batch's tokens from `start` on."""
        index = mx.array(batch.rows, mx.int32)
        for name, columns in stacked.items():
            self.drawn[name][index, start : batch.count] = columns
        for row in batch.alive:
            self.lengths[row] = batch.count

    def end(self, row: int, length: int, finished: bool) -> None:
        """The row has ended after so many tokens."""
        self.lengths[row], self.finished[row] = length, finished

    def rollout(self, prompts: Sequence[Sequence[int]], num_generations: int) -> Rollout:
        """The rollout, as wide as its longest completion, at least 1; zeros after the end of each."""
        lengths_b = mx.array(self.lengths, mx.int32)
        width = max(1, *self.lengths)
        within_bt = mx.arange(width)[None] < lengths_b[:, None]
        cut = {
            name: mx.where(within_bt, array[:, :width], mx.array(0, array.dtype))
            for name, array in self.drawn.items()
        }
        mx.eval(cut)
        return Rollout(
            prompts=tuple(tuple(prompt) for prompt in prompts),
            num_generations=num_generations,
            tokens_bt=cut["tokens"],
            lengths_b=lengths_b,
            logp_bt=cut["logp"],
            finished_b=mx.array(self.finished),
            entropy_bt=cut.get("entropy"),
        )


class Decoder:
    """The decode loop of one part, with its settings."""

    def __init__(self, sampling: Sampling, decoding: Decoding) -> None:
        self._sampling, self._draw = sampling, compiled_draw(sampling)
        self._check_every = max(decoding.check_every, 1)
        self._launch = mx.async_eval if decoding.pipelined else mx.eval
        self._compact = enabled("row_compaction")

    def run(
        self, batches: list[RowBatch], whole: Completions | Transcript, turns: Turns | None = None
    ) -> Columns[None]:
        """Decode until every row has ended; with `turns`, until every conversation has."""
        texts: dict[int, list[int]] = {
            row: [] for batch in batches for row in batch.rows
        }  # of the present turn
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
                    self._collect(batch, texts, whole, turns)
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
                while not batches and not joined and turns.waits:
                    joined = yield from turns.resumed(decoding=False)
                texts |= {row: [] for batch in joined for row in batch.rows}
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

    def _collect(
        self,
        batch: RowBatch,
        texts: dict[int, list[int]],
        whole: Completions | Transcript,
        turns: Turns | None,
    ) -> None:
        """Store the batch's tokens since the last check, and find the rows that go on."""
        start = batch.count - len(batch.drawn)
        stacked = {name: mx.stack([step[name] for step in batch.drawn], axis=1) for name in batch.drawn[0]}
        batch.drawn = []
        whole.store(batch, stacked, start)
        ends = []
        for place, (row, tokens) in enumerate(zip(batch.rows, on_host(stacked["tokens"]), strict=True)):
            if row not in batch.alive:
                continue
            texts[row].extend(tokens)
            room = None if turns is None else turns.room(row)
            end = self._sampling.end_of(texts[row][:room], start)
            if end is not None:
                batch.alive.remove(row)
                whole.end(row, end, True)
                ends.append((place, row, end))
            elif room is not None and len(texts[row]) >= room:
                batch.alive.remove(row)
                whole.end(row, room, False)
        if turns is not None and ends:
            turns.ended(batch, ends)
