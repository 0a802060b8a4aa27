"""Functions that select, split and pad the rows of a batch."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.algorithm import LossSpec
from grpo_fn.backends import enabled
from grpo_fn.learner.batch import Batch
from grpo_fn.trees import on_host

# The axes of each field in a batch and its images. p and l are the axes of `tokens_bl`, b and t
# those of `targets_bt`; "" means that the field is the same in each part, or recomputed for it. An
# array may have fewer axes than listed.
_FIELDS = {
    "": "num_sequences num_tokens vocabulary images features_nd",
    "b": "group_b prompt_index_b hinted_lengths_b row_b",
    "bm": "hinted_tokens_bm",
    "bt": (
        "advantages_b targets_bt mask_bt rollout_logp_bt old_logp_bt ref_logp_bt teacher_logp_bt "
        "keep_bt"
    ),
    "p": "prompt_lengths_b shift_r",
    "pl": "tokens_bl feature_rl",
    "plnk": "experts_blnk",
    "p3l": "positions_r3l",
}
AXES: dict[str, str] = {}
for _axes, _names in _FIELDS.items():
    AXES |= dict.fromkeys(_names.split(), _axes)
# padding of all other fields: 0
_PADDING = {"prompt_lengths_b": 1, "hinted_lengths_b": 1, "feature_rl": -1, "row_b": -1}


def drop_inactive(batch: Batch, spec: LossSpec) -> Batch:
    """Removes the rows without a gradient; the removed rows still count in the denominators.

    Rows without a gradient are fully masked rows and, if there is no KL term or entropy bonus, the
    rows with A = 0 (all rows of a group whose rewards are equal). The function reads the advantages
    and therefore waits for the device.
    """
    if not enabled("inactive_rows"):
        return batch
    counted_b = batch.mask_bt.any(axis=1)
    adv = batch.advantages_b
    taught_b = adv != 0 if adv.ndim == 1 else (batch.mask_bt & (adv != 0)).any(axis=1)
    active_b = counted_b if spec.needs_every_row else counted_b & taught_b
    active = [row for row, flag in enumerate(on_host(active_b)) if flag]
    return batch if len(active) == active_b.shape[0] else take_rows(batch, active)


def minibatches(batch: Batch, number: int) -> list[Batch]:
    """Splits a batch into `number` parts of consecutive rows, each with its own counts, for one
    update each.

    Raises:
        ValueError: there are fewer rows than parts.
    """
    rows = batch.mask_bt.shape[0]
    if not 1 <= number <= rows:
        raise ValueError(
            f"number = {number}: expected 1 <= number <= {rows}, the rows of the batch"
        )
    bounds = [rows * i // number for i in range(number + 1)]
    return [counted_alone(take_rows(batch, range(low, high))) for low, high in pairwise(bounds)]


def counted_alone(batch: Batch) -> Batch:
    """Replaces the batch's denominators by counts of only its own rows and tokens."""
    return attrs.evolve(
        batch,
        num_sequences=mx.array(float(batch.mask_bt.shape[0])),
        num_tokens=batch.mask_bt.sum().astype(mx.float32),
    )


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Selects the given rows, in that order; the counts for the denominators remain the whole
    batch's.

    Use `take_rows` only for batches in which each row has its own prompt, that is, before
    `split_batch` shares them.
    """
    return take_part(batch, rows, rows)


def take_part(
    batch: Batch,
    rows: Sequence[int],
    prompts: Sequence[int] | None,
    sizes: Mapping[str, int] | None = None,
) -> Batch:
    """Selects, truncates and pads the fields of a batch along their `AXES`; the counts remain the
    whole batch's. No other function truncates or pads a batch.

    Args:
        rows: the rows of `targets_bt`.
        prompts: the rows of `tokens_bl`; None means all.
        sizes: new sizes of the axes b, t, p and l; None changes no size. A row of padding has an
            empty mask and prompt length 1.

    Raises:
        ValueError: `AXES` lacks a field of the batch.
    """
    index = {"b": mx.array(list(rows), mx.int32)}
    if prompts is not None:
        index["p"] = mx.array(list(prompts), mx.int32)
    return _part(batch, index, sizes or {})


def _part(value: Any, index: dict[str, mx.array], sizes: Mapping[str, int]) -> Any:
    """Selects each field's entries by the index for its axis, then truncates and pads them to the
    sizes.
    """
    found: dict[str, Any] = {}
    for name in attrs.fields_dict(type(value)):
        if name not in AXES:
            raise ValueError(
                f"{type(value).__name__}.{name}: expected its axes in `batch_rows.AXES`, found none"
            )
        array = getattr(value, name)
        axes = AXES[name]
        if attrs.has(type(array)):
            found[name] = _part(array, index, sizes)
        elif array is not None and axes:
            array = array[index[axes[0]]] if axes[0] in index else array
            wanted: Any = [
                sizes.get(axis, size) for axis, size in zip(axes, array.shape, strict=False)
            ]
            array = array[tuple(slice(size) for size in wanted)]
            more = [(0, size - now) for size, now in zip(wanted, array.shape, strict=True)]
            filling = mx.array(_PADDING.get(name, 0), array.dtype)
            # Empty arrays are filled, not padded: on CUDA, converting padded ones to NumPy, or
            # saving them, would end the process (benchmarks/architectures/upstream.md).
            found[name] = (
                mx.pad(array, more, constant_values=filling)
                if array.size
                else mx.full(wanted, filling)
            )
    return attrs.evolve(value, **found)
