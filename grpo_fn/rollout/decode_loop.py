"""The decode loop: rows start, sample one token per step, and leave when they are finished.

The loop is a generator: it yields each step's tokens as a `Column`, and the caller has control
between steps.
"""

from collections.abc import Generator

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled
from grpo_fn.policy.policy import Policy
from grpo_fn.process_check import check_process
from grpo_fn.rollout.begin import begin
from grpo_fn.rollout.decode_step import RowBatch, T
from grpo_fn.rollout.row_queue import RowQueue
from grpo_fn.trees import Tree, on_host

COMPACT_SHARE = 0.25  # finished rows are dropped once they are this share of the batch


@attrs.frozen(eq=False)
class Column:
    """One decoding step's tokens, one for each row of a batch, possibly not computed yet."""

    # Row numbers, including some rows that ended in the last few steps, and −1 for places without a
    # row.
    rows: tuple[int, ...]
    tokens_b: mx.array  # int32
    logp_b: mx.array  # float32


# yields None after each piece of a prefill, and while it waits
Columns = Generator[Column | None, None, T]


@attrs.frozen
class Decoding:
    """Settings for decoding completions. These settings affect only speed and memory; results are
    the same up to rounding.

    Attributes:
        max_batch: the maximum number of rows decoded together; 0 means all. Groups are not split;
            at least one group is decoded.
        check_every: steps between checks for finished rows and for rows that can start; a check
            waits for the device.
        pipelined: submit each step to the device before the previous one is finished. Pipelining
            hides launch time on a GPU, but requires a copy of the cache.
        share_prefix: keep a single copy of a prompt's keys and values for all its completions, if
            the model supports this; None means True on CPU and CUDA.
        turns_together: in conversations, start turns once no row is decoding and all replies have
            arrived, so that results are bit-identical in each run. If False, a turn starts as soon
            as its reply has arrived, so that a slow reply does not delay other rows; rounding then
            depends on timing.
        few_sizes: with a backend's compiled steps, pad a batch with unused rows to one of few
            sizes. Use this option for servers: a program is compiled for each size, and any number
            of requests may arrive at once.
    """

    max_batch: int = 0
    check_every: int = 8
    pipelined: bool = False
    share_prefix: bool | None = None
    turns_together: bool = True
    few_sizes: bool = False


def decode_queue(
    policy: Policy, params: Tree, queue: RowQueue, decoding: Decoding | None = None
) -> Columns[None]:
    """Decodes until the queue is empty; yields each step's tokens, and None after a piece of a
    prefill.

    Between two steps, the caller may add, cancel and take rows; the policy's module contains the
    parameters. Added rows join the decoding rows at the next check for finished rows, or earlier if
    there are many. If the generator is closed, another generator does not continue its rows: cancel
    them.
    """
    check_process()
    decoding = decoding or Decoding()
    batches: list[RowBatch] = []
    steps = 0
    look = True
    with policy.sampling(params, queue.widest(decoding.max_batch)) as model:
        while batches or queue.waiting:
            if look or not batches:
                starts = queue.due(sum(len(batch.alive) for batch in batches), decoding.max_batch)
                few_sizes = decoding.few_sizes and not batches
                begun = yield from begin(
                    policy, model, starts, decoding.share_prefix, few_sizes=few_sizes
                )
                for new in begun:
                    if not any(batch.join(new) for batch in batches):
                        batches.append(new)
            for batch in batches:
                batch.draw()
            (mx.async_eval if decoding.pipelined else mx.eval)(
                [batch.drawn[-1] for batch in batches]
            )
            steps += 1
            for batch in batches:
                yield Column(tuple(batch.rows), batch.drawn[-1]["tokens"], batch.drawn[-1]["logp"])
            every = max(decoding.check_every, 1)
            rows = sum(len(batch.alive) for batch in batches)
            # If few rows wait, the caches are copied only now and then; if many wait, at once.
            joins = every * queue.rows_due(rows, decoding.max_batch) >= rows
            look = joins or steps % every == 0 or any(batch.is_full for batch in batches)
            for batch in batches:
                _advance(batch, queue, look)
            batches = [batch for batch in batches if batch.alive]


def _advance(batch: RowBatch, queue: RowQueue, look: bool) -> None:
    """Feeds each row its newest token; in a step with a check, only rows that have not ended."""
    token_b = batch.drawn[-1]["tokens"]
    if look or batch.watched:
        _collect(batch, queue)
    if batch.alive:
        if look and compacts(batch):
            token_b = token_b[mx.array(batch.drop_ended())]
        batch.logits_bv = batch.steps(token_b)


def compacts(batch: RowBatch) -> bool:
    """Returns whether enough rows have finished for the batch to be compacted."""
    return (
        enabled("row_compaction")
        and batch.steps.drops_rows
        and len(batch.alive) <= (1 - COMPACT_SHARE) * len(batch.rows)
    )


def _collect(batch: RowBatch, queue: RowQueue) -> None:
    """Moves the tokens sampled since the last check to the queue, and finds the rows that have
    ended.
    """
    columns = {
        name: on_host(mx.stack([n[name] for n in batch.drawn], axis=1)) for name in batch.drawn[0]
    }
    batch.drawn = []
    batch.alive &= queue.rows.keys()  # without cancelled rows
    for place, number in enumerate(batch.rows):
        if number not in batch.alive:
            continue
        row = queue.rows[number]
        tokens = row.done.tokens
        start = len(tokens)
        for name, column in columns.items():  # also the names of a row's lists
            getattr(row.done, name).extend(column[place])
        limit = row.entry.sampling.max_new_tokens
        length = row.entry.sampling.end_of(tokens[:limit], start, row.entry.find_stop)
        if length is not None or len(tokens) >= limit:
            batch.alive.remove(number)
            queue.ended(batch, place, limit if length is None else length, length is not None)
