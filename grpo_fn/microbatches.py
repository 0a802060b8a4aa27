"""Micro-batches: a batch cut to what the learner's memory holds, in few shapes and with little padding."""

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from grpo_fn.batches import Batch, take_rows
from grpo_fn.trees import on_host

Size = Callable[[int], int]


def split_batch(
    batch: Batch, *, max_tokens: int, bucketed: bool = True, share_prompts: bool = False
) -> list[Batch]:
    """Cut a batch into micro-batches of at most `max_tokens` tokens each, padding included.

    Rows are sorted by length, so that a micro-batch holds rows of like length; each is cut to its own longest
    row. With `bucketed`, rows and lengths are rounded up to a few sizes (at most a quarter more) so that the
    compiled step sees few shapes: rows of padding have an empty mask and count nowhere. A single row longer
    than `max_tokens` gets a micro-batch of its own.

    With `share_prompts` the rows of a group stay together and their prompt stands, and is computed, once;
    only for models that `sharing.can_share`.

    Any split gives the same update: the counts of the whole are shared out among the parts.

    Raises:
        ValueError: max_tokens < 1, or prompts cannot be shared as the batch has no groups.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: wanted at least 1")
    if share_prompts and batch.group_b is None:
        raise ValueError("share_prompts needs group_b, the number of each row's prompt; make_batch gives it")
    rows = batch.mask_bt.shape[0]
    if rows == 0:
        return [batch]
    size: Size = round_up if bucketed else (lambda number: number)
    span_bt = batch.mask_bt * mx.arange(1, batch.mask_bt.shape[1] + 1)  # masks may have holes
    completion = [max(n, 1) for n in on_host(span_bt.max(axis=1))]
    prompt = on_host(batch.prompt_lengths_b)
    group = on_host(batch.group_b) if share_prompts and batch.group_b is not None else list(range(rows))

    def cost(part: list[int]) -> int:
        if not share_prompts:
            return size(len(part)) * size(max(prompt[row] + completion[row] for row in part))
        prompts = {group[row]: prompt[row] for row in part}
        width = size(max(completion[row] for row in part))
        return size(len(prompts)) * size(max(prompts.values())) + size(len(part)) * width

    if share_prompts:
        order = sorted(range(rows), key=lambda row: (prompt[row], group[row], completion[row]))
    else:
        order = sorted(range(rows), key=lambda row: prompt[row] + completion[row])
    parts: list[list[int]] = [[]]
    for row in order:
        if parts[-1] and cost([*parts[-1], row]) > max_tokens:
            parts.append([])
        parts[-1].append(row)

    pieces = [take_rows(batch, part) for part in parts]
    counted = [piece.mask_bt.sum().astype(mx.float32) for piece in pieces]
    left_out = batch.num_sequences - rows, batch.num_tokens - mx.stack(counted).sum()
    batches = []
    for part, piece, tokens in zip(parts, pieces, counted, strict=True):
        first = not batches  # it counts what was left out of the batch
        piece = attrs.evolve(
            piece,
            num_sequences=mx.array(float(len(part))) + (left_out[0] if first else 0.0),
            num_tokens=tokens + (left_out[1] if first else 0.0),
            group_b=None,
        )
        width = size(max(completion[row] for row in part))
        if share_prompts:
            piece = _with_shared_prompts(piece, [group[row] for row in part], size)
        else:
            length = size(max(prompt[row] + completion[row] for row in part))
            piece = _resized_prompts(piece, size(len(part)), length)
        batches.append(_resized_rows(piece, size(len(part)), width))
    return batches


def round_up(number: int) -> int:
    """The next size of a ladder with four steps an octave (8, 10, 12, 14, 16, 20, …); up to 8, the number."""
    if number <= 8:
        return number
    step = 1 << (number.bit_length() - 3) if number & (number - 1) else 1
    return -(-number // step) * step


def _with_shared_prompts(piece: Batch, groups: Sequence[int], size: Size) -> Batch:
    """Each distinct prompt of the rows once, and for each row which one it continues."""
    first = {group: row for row, group in reversed(list(enumerate(groups)))}
    places = {group: place for place, group in enumerate(first)}
    index = mx.array(list(first.values()), mx.int32)
    lengths_p = piece.prompt_lengths_b[index]
    piece = attrs.evolve(
        piece,
        tokens_bl=piece.tokens_bl[index],
        prompt_lengths_b=lengths_p,
        prompt_index_b=mx.array([places[group] for group in groups], mx.int32),
    )
    return _resized_prompts(piece, size(len(first)), size(max(on_host(lengths_p))))


def _resized_prompts(piece: Batch, rows: int, length: int) -> Batch:
    """`tokens_bl` cut or padded to [rows, length]; a row of padding has prompt length 1."""
    missing = rows - piece.tokens_bl.shape[0]
    return attrs.evolve(
        piece,
        tokens_bl=_fitted(piece.tokens_bl, rows, length),
        prompt_lengths_b=mx.pad(piece.prompt_lengths_b, [(0, missing)], constant_values=mx.array(1)),
    )


def _resized_rows(piece: Batch, rows: int, width: int) -> Batch:
    """The other columns cut or padded with zeros to B = rows, T = width."""
    missing = rows - piece.mask_bt.shape[0]

    def fitted(array: mx.array | None) -> mx.array | None:
        return None if array is None else _fitted(array, rows, width)

    index_b = piece.prompt_index_b
    return attrs.evolve(
        piece,
        targets_bt=_fitted(piece.targets_bt, rows, width),
        mask_bt=_fitted(piece.mask_bt, rows, width),
        advantages_b=mx.pad(piece.advantages_b, [(0, missing)]),
        rollout_logp_bt=_fitted(piece.rollout_logp_bt, rows, width),
        old_logp_bt=fitted(piece.old_logp_bt),
        ref_logp_bt=fitted(piece.ref_logp_bt),
        keep_bt=fitted(piece.keep_bt),
        prompt_index_b=None if index_b is None else mx.pad(index_b, [(0, missing)]),
    )


def _fitted(array: mx.array, rows: int, columns: int) -> mx.array:
    array = array[:, :columns]
    return mx.pad(array, [(0, rows - array.shape[0]), (0, columns - array.shape[1])])
