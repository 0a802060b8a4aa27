"""Micro-batches: cuts a batch to fit the learner's memory, in few shapes and with little padding."""

from collections.abc import Collection, Sequence

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled
from grpo_fn.learner.batch import Batch, take_rows
from grpo_fn.learner.packing import Packer, Row, Shape
from grpo_fn.trees import on_host


def split_batch(
    batch: Batch,
    *,
    max_tokens: int,
    bucketed: bool = True,
    share_prompts: bool = False,
    known: Collection[Shape] = (),
    new_shape_tokens: int = 0,
) -> list[Batch]:
    """Cut a batch into micro-batches of at most `max_tokens` tokens each, including padding.

    Rows of similar length come into one micro-batch; see `packing`. With `bucketed` sizes are rounded up, by
    at most an eighth, so that the compiled step sees few shapes. Rows of padding have an empty mask and count
    nowhere. A single row longer than `max_tokens` gets a micro-batch of its own.

    With `share_prompts` a group's rows may stay together and use one copy of their prompt, where that takes
    fewer tokens. The model has to support it: see `can_share`.

    Any split gives the same update: the micro-batches' counts add up to the batch's.

    Args:
        known: shapes that the step has been compiled for.
        new_shape_tokens: how many tokens of padding are accepted to avoid a new shape.

    Raises:
        ValueError: max_tokens < 1, or prompts cannot be shared as the batch has no groups.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: wanted at least 1")
    if share_prompts and batch.group_b is None:
        raise ValueError("share_prompts needs group_b, the number of each row's prompt; make_batch gives it")
    if batch.mask_bt.shape[0] == 0:
        return [batch]
    packer = Packer(max_tokens=max_tokens, bucketed=bucketed, known=known, new_shape_tokens=new_shape_tokens)
    rows = _rows_of(batch)
    # The first micro-batch also counts what was left out of the batch.
    uncounted = batch.num_sequences - len(rows), batch.num_tokens - sum(row.counted for row in rows)
    batches = []
    for run in packer.pack(rows, share_prompts):
        sequences, tokens = uncounted if not batches else (mx.array(0.0), mx.array(0.0))
        piece = attrs.evolve(
            take_rows(batch, [row.number for row in run.rows]),
            num_sequences=len(run.rows) + sequences,
            num_tokens=sum(row.counted for row in run.rows) + tokens,
            group_b=None,
        )
        if run.shape.prompts:
            piece = _with_shared_prompts(piece, [row.group for row in run.rows])
        batches.append(_fitted_to(piece, run.shape))
    return batches


def halve_batch(piece: Batch) -> list[Batch]:
    """Two micro-batches with half of the rows each, to save memory; a single row is returned unchanged.

    Both keep all shared prompts. Their counts add up to those of `piece`.
    """
    rows, width = piece.targets_bt.shape
    if rows < 2:
        return [piece]
    middle = (rows + 1) // 2
    parts = [_rows_between(piece, *bounds, width) for bounds in ((0, middle), (middle, rows))]
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
    positions = rows * width if piece.positions_n is None else piece.positions_n.shape[0]
    prompts = 0 if piece.prompt_index_b is None else piece.tokens_bl.shape[0]
    return Shape(prompts, piece.tokens_bl.shape[1], rows, width, positions)


def _rows_between(piece: Batch, low: int, high: int, width: int) -> Batch:
    """The rows from `low` to before `high`; shared prompts and the counts are unchanged."""
    prompts = {"tokens_bl", "prompt_lengths_b"} if piece.prompt_index_b is not None else set()
    of_whole = {"num_sequences", "num_tokens", "positions_n", "vocabulary", "images"}
    by_row = {field.name for field in attrs.fields(Batch)} - prompts - of_whole
    found = {name: getattr(piece, name) for name in by_row}
    cut = {name: array[low:high] for name, array in found.items() if array is not None}
    if piece.positions_n is not None:
        cut["positions_n"] = _counted_positions(
            cut["mask_bt"], min(piece.positions_n.shape[0], (high - low) * width)
        )
    if piece.images is not None and piece.prompt_index_b is None:
        cut["images"] = piece.images.rows(mx.arange(low, high))
    return attrs.evolve(piece, **cut)


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


def _with_shared_prompts(piece: Batch, groups: Sequence[int]) -> Batch:
    """Each distinct prompt of the rows once, and for each row which one it continues."""
    first = {group: row for row, group in reversed(list(enumerate(groups)))}
    places = {group: place for place, group in enumerate(first)}
    index = mx.array(list(first.values()), mx.int32)
    return attrs.evolve(
        piece,
        tokens_bl=piece.tokens_bl[index],
        prompt_lengths_b=piece.prompt_lengths_b[index],
        prompt_index_b=mx.array([places[group] for group in groups], mx.int32),
        images=None if piece.images is None else piece.images.rows(index),
    )


def _fitted_to(piece: Batch, shape: Shape) -> Batch:
    """The piece cut and padded to a shape; a row of padding has an empty mask and prompt length 1."""
    rows, width = shape.rows, shape.width
    prompts = shape.prompts or rows
    missing = rows - piece.mask_bt.shape[0]

    def fitted(array: mx.array | None) -> mx.array | None:
        return None if array is None else _fitted(array, rows, width)

    index_b = piece.prompt_index_b
    mask_bt = _fitted(piece.mask_bt, rows, width)
    return attrs.evolve(
        piece,
        tokens_bl=_fitted(piece.tokens_bl, prompts, shape.length),
        prompt_lengths_b=mx.pad(
            piece.prompt_lengths_b,
            [(0, prompts - piece.prompt_lengths_b.shape[0])],
            constant_values=mx.array(1),
        ),
        targets_bt=_fitted(piece.targets_bt, rows, width),
        mask_bt=mask_bt,
        advantages_b=mx.pad(piece.advantages_b, [(0, missing)]),
        rollout_logp_bt=_fitted(piece.rollout_logp_bt, rows, width),
        old_logp_bt=fitted(piece.old_logp_bt),
        ref_logp_bt=fitted(piece.ref_logp_bt),
        keep_bt=fitted(piece.keep_bt),
        prompt_index_b=None if index_b is None else mx.pad(index_b, [(0, missing)]),
        positions_n=_counted_positions(mask_bt, shape.positions) if enabled("counted_positions") else None,
        images=None if piece.images is None else piece.images.fitted(prompts, shape.length),
    )


def _counted_positions(mask_bt: mx.array, number: int) -> mx.array:
    """Flat positions of the mask's tokens, filled up to `number` with the position one past its end."""
    size = mask_bt.size
    flat = mx.where(mask_bt.reshape(-1), mx.arange(size, dtype=mx.int32), size)
    if number > size:
        return mx.pad(mx.sort(flat), [(0, number - size)], constant_values=mx.array(size, mx.int32))
    return mx.sort(flat)[:number]


def _fitted(array: mx.array, rows: int, columns: int) -> mx.array:
    array = array[:, :columns]
    return mx.pad(array, [(0, rows - array.shape[0]), (0, columns - array.shape[1])])
