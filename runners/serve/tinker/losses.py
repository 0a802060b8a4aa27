"""Tinker's losses, which are sums over tokens. Rows with one number per token are converted to the
learner's batches.

`importance_sampling` and `cispo` multiply the gradient of log π by the probability ratio to the
sampler, expressed as a correction weight: −r·A, and −sg(clip(r))·A·log π.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.errors import UserError, did_you_mean, listed, show

TARGETS = "target_tokens"
RATIO_MASK = "sequence_ratio_mask"
UNBOUNDED = 1e30  # a cap that exceeds every ratio
_SAMPLED = (TARGETS, "logprobs", "advantages")
_BAND = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@attrs.frozen(eq=False)
class Datum:
    """One training row. At position i, the model reads `tokens[i]` and predicts
    `inputs[TARGETS][i]`.
    """

    tokens: np.ndarray  # int32 [N]
    inputs: Mapping[str, np.ndarray]  # one array [N] for each input


@attrs.frozen(eq=False)
class Loss:
    """A Tinker loss: its required inputs, its parameters, and its LossSpec fields."""

    needs: tuple[str, ...]  # names of the arrays that each row must contain
    defaults: Mapping[str, float]  # parameters and their default values
    fields: Callable[
        ..., dict[str, Any]
    ]  # computes LossSpec fields from the parameters, which are passed in the order of `defaults`
    by_old: bool = True  # True: the sampler is the ratio's π_old; False: it is the correction's μ


def _weighted(surrogate: str, low: float = 0.0, high: float = UNBOUNDED) -> dict[str, Any]:
    return {
        "surrogate": surrogate,
        "correction": "token_truncate",
        "correction_floor": low,
        "correction_cap": high,
    }


def _clipped(low: float, high: float, level: str = "token") -> dict[str, Any]:
    return {"level": level, "epsilon_low": 1 - low, "epsilon_high": high - 1}


LOSSES = {
    "cross_entropy": Loss((TARGETS, "weights"), {}, lambda: {"surrogate": "likelihood"}),
    "importance_sampling": Loss(_SAMPLED, {}, lambda: _weighted("none"), by_old=False),
    "ppo": Loss(_SAMPLED, _BAND, _clipped),
    "cispo": Loss(
        _SAMPLED, _BAND, lambda low, high: _weighted("likelihood", low, high), by_old=False
    ),
    "dro": Loss(_SAMPLED, {"beta": 0.05}, lambda beta: {"surrogate": "dro", "dro_beta": beta}),
    "gspo": Loss((*_SAMPLED, RATIO_MASK), _BAND, lambda low, high: _clipped(low, high, "sequence")),
}


def loss_of(name: str, config: Mapping[str, Any]) -> tuple[Loss, g.LossSpec]:
    """Returns the loss with this name, and its LossSpec with these parameters. Raises UserError for
    an unknown name or for unknown or impossible parameters.
    """
    if name not in LOSSES:
        raise UserError(
            f"loss_fn: expected {listed([*LOSSES])}, found {show(name)}{did_you_mean(name, LOSSES)}"
        )
    loss = LOSSES[name]
    unknown = config.keys() - loss.defaults.keys()
    if unknown:
        raise UserError(
            f"loss_fn_config: expected {listed([*loss.defaults])}, found {listed(sorted(unknown))}"
        )
    values = {**loss.defaults, **config}
    try:
        return loss, g.LossSpec(aggregation="sum", **loss.fields(*values.values()))
    except (ValueError, TypeError) as error:
        raise UserError(f"loss_fn_config: {show(values)} is not possible: {error}") from error


def check_data(data: Sequence[Datum], loss: Loss, vocabulary: int | None, length: int) -> None:
    """Raises UserError unless each row contains the loss's inputs, and token ids that the model
    has.
    """
    if not data:
        raise UserError("data: expected at least one datum, found none")
    for number, datum in enumerate(data):
        fault = next(_faults(datum, loss, vocabulary or np.inf, length), None)
        if fault:
            raise UserError(f"data[{number}]: {fault}")


def _faults(datum: Datum, loss: Loss, most: float, length: int) -> Iterator[str]:
    """Yields a message for each error in a row. Later checks assume that earlier ones passed."""
    size = len(datum.tokens)
    arrays = {"model_input": datum.tokens, **datum.inputs}
    known = {"model_input", *loss.needs}
    for name in sorted(known - arrays.keys() - {"weights"}):
        yield f"{name} is missing"
    for name in sorted(arrays.keys() - known):
        yield f"the loss does not accept {show(name)}{did_you_mean(name, known)}"
    if not 1 <= size <= length:
        yield f"expected 1 to {length} tokens, found {size}"
    for name, values in arrays.items():
        if values.shape != (size,):
            yield f"{name}: expected {size} numbers, one for each token, found {[*values.shape]}"
        if name in ("model_input", TARGETS) and not (
            values.dtype.kind == "i" and 0 <= values.min() <= values.max() < most
        ):
            yield f"{name}: expected token ids >= 0 and < {most}, found others"
        if not np.isfinite(values).all():
            yield f"{name}: expected finite numbers, found others"
    if RATIO_MASK in arrays and arrays["advantages"][arrays[RATIO_MASK] == 0].any():
        yield f"advantages: expected 0 where {RATIO_MASK} is 0"


def batch_of(data: Sequence[Datum], loss: Loss) -> g.Batch:
    """Converts rows to a batch in which every position is unmasked; `row_b` contains the row
    numbers.

    Until the batch is split, `keep_bt` contains the ratio mask, if there is one; see `counted`.
    """
    rows = [
        (datum.tokens[:1].tolist(), [*datum.tokens[1:].tolist(), int(datum.inputs[TARGETS][-1])])
        for datum in data
    ]
    inputs = [{"weights": np.ones(len(datum.tokens)), **datum.inputs} for datum in data]
    factors = [each.get("advantages", each["weights"]).tolist() for each in inputs]
    drawn = [each.tolist() for each in _column(data, "logprobs")]
    batch = g.batch_of(rows, factors, logp=drawn or None)
    masks = _column(data, RATIO_MASK)
    return attrs.evolve(
        batch,
        targets_bt=_padded(_column(data, TARGETS)).astype(mx.int32),
        old_logp_bt=batch.old_logp_bt if loss.by_old else None,
        keep_bt=_padded([mask != 0 for mask in masks]) if masks else None,
        row_b=mx.arange(len(data), dtype=mx.int32),
    )


def counted(piece: g.Batch) -> g.Batch:
    """Applies the ratio mask in `keep_bt`, if there is one, to a micro-batch's token mask."""
    if piece.keep_bt is None:
        return piece
    return attrs.evolve(piece, mask_bt=piece.mask_bt & piece.keep_bt, keep_bt=None)


def _column(data: Sequence[Datum], name: str) -> list[np.ndarray]:
    return [datum.inputs[name] for datum in data if name in datum.inputs]


def _padded(rows: Sequence[np.ndarray]) -> mx.array:
    width = max(map(len, rows))
    return mx.array(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
