"""Micro-batches: cuts a batch to fit the learner's memory, in few shapes and with little padding."""

from collections.abc import Collection

import attrs
import mlx.core as mx

from grpo_fn.learner.batch import Batch, take_part
from grpo_fn.learner.packing import PIECE_TOKENS, PackedRun, Packer, Row, Shape
from grpo_fn.trees import on_host


def split_batch(
    batch: Batch,
    *,
    max_tokens: int,
    bucketed: bool = True,
    share_prompts: bool = False,
    known: Collection[Shape] = (),
    new_shape_tokens: int = 0,
    piece_tokens: int = PIECE_TOKENS,
) -> list[Batch]:
    """Cut a batch into micro-batches of at most `max_tokens` tokens each, including padding.

    Rows of similar length come into one micro-batch; see `packing`. With `bucketed` sizes are rounded up, by
    at most an eighth, so that the compiled step sees few shapes. Rows of padding have an empty mask and count
    nowhere. A single row longer than `max_tokens` gets a micro-batch of its own.

    With `share_prompts` a group's rows may stay together and use one copy of their prompt, where that takes
    fewer tokens. The model has to support it: see `can_share`. Given experts are for whole rows: they are not
    shared.

    Any split gives the same update: the micro-batches' counts add up to the batch's.

    Args:
        known: shapes that the step has been compiled for.
        new_shape_tokens: how many tokens of padding are accepted to avoid a new shape.
        piece_tokens: a micro-batch's fixed cost in tokens.

    Raises:
        ValueError: max_tokens < 1, or prompts cannot be shared as the batch has no groups.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: expected at least 1")
    if share_prompts and batch.group_b is None:
        raise ValueError("share_prompts needs group_b, the number of each row's prompt; make_batch gives it")
    if batch.mask_bt.shape[0] == 0:
        return [batch]
    prices = {"new_shape_tokens": new_shape_tokens, "piece_tokens": piece_tokens}
    packer = Packer(max_tokens=max_tokens, bucketed=bucketed, known=known, **prices)
    rows = _rows_of(batch)
    # The first micro-batch also counts what was left out of the batch.
    uncounted = batch.num_sequences - len(rows), batch.num_tokens - sum(row.counted for row in rows)
    batches = []
    for run in packer.pack(rows, share_prompts and batch.experts_blnk is None):
        sequences, tokens = uncounted if not batches else (mx.array(0.0), mx.array(0.0))
        piece = attrs.evolve(
            batch,
            num_sequences=len(run.rows) + sequences,
            num_tokens=sum(row.counted for row in run.rows) + tokens,
            group_b=None,
        )
        batches.append(_packed(piece, run))
    return batches


def halve_batch(piece: Batch) -> list[Batch]:
    """Two micro-batches with half of the rows each, to save memory; a single row is returned unchanged.

    Both keep all shared prompts. Their counts add up to those of `piece`.
    """
    rows = piece.mask_bt.shape[0]
    if rows < 2:
        return [piece]
    parts = []
    for part in (range((rows + 1) // 2), range((rows + 1) // 2, rows)):
        prompts = part if piece.prompt_index_b is None else None
        parts.append(take_part(piece, part, prompts))
    second = parts[1]
    counts = {
        "num_sequences": second.mask_bt.any(axis=1).sum().astype(mx.float32),
        "num_tokens": second.mask_bt.sum().astype(mx.float32),
    }
    rest = {name: getattr(piece, name) - count for name, count in counts.items()}
    return [attrs.evolve(parts[0], **rest), attrs.evolve(second, **counts)]


def shape_of(piece: Batch) -> Shape:
    """The shape of a micro-batch that `split_batch` made."""
    rows, width = piece.targets_bt.shape
    prompts = 0 if piece.prompt_index_b is None else piece.tokens_bl.shape[0]
    return Shape(prompts, piece.tokens_bl.shape[1], rows, width)


def _rows_of(batch: Batch) -> list[Row]:
    number = batch.mask_bt.shape[0]
    span_bt = batch.mask_bt * mx.arange(1, batch.mask_bt.shape[1] + 1)  # masks may have holes
    columns = (
        on_host(batch.group_b) if batch.group_b is not None else range(number),
        on_host(batch.prompt_lengths_b),
        on_host(mx.maximum(span_bt.max(axis=1), 1)),
        on_host(batch.mask_bt.sum(axis=1)),
    )
    return [Row(i, *values) for i, values in enumerate(zip(*columns, strict=True))]


def _packed(batch: Batch, run: PackedRun) -> Batch:
    """The run's rows in its shape; with shared prompts, each distinct prompt of them once."""
    numbers, shape = [row.number for row in run.rows], run.shape
    first = {row.group: row.number for row in reversed(run.rows)} if shape.prompts else {}
    part = take_part(
        batch,
        numbers,
        list(first.values()) or numbers,
        b=shape.rows,
        t=shape.width,
        p=shape.prompts or shape.rows,
        l=shape.length,
    )
    if first:
        places = {group: place for place, group in enumerate(first)}
        index_b = mx.array([places[row.group] for row in run.rows], mx.int32)
        part = attrs.evolve(part, prompt_index_b=mx.pad(index_b, (0, shape.rows - len(numbers))))
    return part
