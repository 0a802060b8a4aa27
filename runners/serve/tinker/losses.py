"""Tinker's losses: rows of tokens with numbers for each, as batches of the learner.

All of them are sums over tokens. `importance_sampling` and `cispo` multiply the gradient of log π by
the ratio to the sampler, as a correction's weight: −r·A, and −sg(clip(r))·A·log π.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.errors import UserError, did_you_mean, listed, show

TARGETS = "target_tokens"
RATIO_MASK = "sequence_ratio_mask"
UNBOUNDED = 1e30  # a cap that no ratio reaches
_LOW = "clip_low_threshold"
_HIGH = "clip_high_threshold"


@attrs.frozen(eq=False)
class Datum:
    """A row: at position i the model reads `tokens[i]` and is asked for `inputs[TARGETS][i]`."""

    tokens: np.ndarray  # int32 [N]
    inputs: Mapping[str, np.ndarray]  # [N] each


@attrs.frozen(eq=False, kw_only=True)
class Loss:
    """A loss by name: its parameters, what its rows must have, and the learner's spec."""

    defaults: Mapping[str, float]
    spec: Callable[..., g.LossSpec]  # takes the parameters in this order
    needs: tuple[str, ...] = (TARGETS, "logprobs", "advantages")
    may: tuple[str, ...] = ()
    by_old: bool = True  # whether the sampler is the policy of the ratio; else the correction's


class Rows(NamedTuple):
    """Data for the learner."""

    data: Sequence[Datum]
    loss: Loss
    spec: g.LossSpec


def _spec(surrogate: str, **fields: object) -> g.LossSpec:
    return g.LossSpec(surrogate=surrogate, aggregation="sum", **fields)  # type: ignore[arg-type]


def _weighted(surrogate: str, low: float, high: float) -> g.LossSpec:
    return _spec(surrogate, correction="token_truncate", correction_floor=low, correction_cap=high)


def _clipped(level: str) -> Callable[[float, float], g.LossSpec]:
    return lambda low, high: _spec("clip", level=level, epsilon_low=1 - low, epsilon_high=high - 1)


_BAND = {_LOW: 0.8, _HIGH: 1.2}
LOSSES = {
    "cross_entropy": Loss(
        defaults={}, spec=lambda: _spec("likelihood"), needs=(TARGETS,), may=("weights",)
    ),
    "importance_sampling": Loss(
        defaults={}, spec=lambda: _weighted("none", 0.0, UNBOUNDED), by_old=False
    ),
    "ppo": Loss(defaults=_BAND, spec=_clipped("token")),
    "cispo": Loss(
        defaults=_BAND, spec=lambda low, high: _weighted("likelihood", low, high), by_old=False
    ),
    "dro": Loss(defaults={"beta": 0.05}, spec=lambda beta: _spec("dro", dro_beta=beta)),
    "gspo": Loss(
        defaults=_BAND,
        spec=_clipped("sequence"),
        needs=(TARGETS, "logprobs", "advantages", RATIO_MASK),
    ),
}


def loss_of(name: str) -> Loss:
    """The loss with this name. Raises UserError, with the names that there are."""
    if name in LOSSES:
        return LOSSES[name]
    raise UserError(
        f"loss_fn: expected {listed([*LOSSES])}, found {show(name)}{did_you_mean(name, LOSSES)}"
    )


def spec_of(loss: Loss, config: Mapping[str, float | str]) -> g.LossSpec:
    """The learner's spec for these parameters. Raises UserError for unknown or impossible ones."""
    for name, value in config.items():
        if name not in loss.defaults:
            known = listed([*loss.defaults]) if loss.defaults else "nothing"
            raise UserError(f"loss_fn_config: expected {known}, found {show(name)}")
        if isinstance(value, str) or not np.isfinite(value):
            raise UserError(f"loss_fn_config.{name}: expected a number, found {show(value)}")
    values = {**loss.defaults, **config}
    try:
        return loss.spec(*values.values())
    except ValueError as error:
        raise UserError(f"loss_fn_config: {show(values)} is not possible: {error}") from error


def check_data(data: Sequence[Datum], loss: Loss, vocabulary: int | None, length: int) -> None:
    """Raises UserError unless the rows have what the loss needs, and the model has their tokens."""
    if not data:
        raise UserError("data: expected at least one datum, found none")
    known = {*loss.needs, *loss.may}
    for number, datum in enumerate(data):
        where = f"data[{number}]"
        size = len(datum.tokens)
        if not 1 <= size <= length:
            raise UserError(f"{where}.model_input: expected 1 to {length} tokens, found {size}")
        names = datum.inputs.keys()
        for name in sorted(known ^ names):
            if name in loss.needs:
                raise UserError(f"{where}.loss_fn_inputs: {name} is missing")
            if name in names:
                near = did_you_mean(name, known)
                raise UserError(
                    f"{where}.loss_fn_inputs: this loss does not take {show(name)}{near}"
                )
        for name, values in {"model_input": datum.tokens, **datum.inputs}.items():
            _check_values(f"{where}.{name}", name, values, size, vocabulary)
        if RATIO_MASK in names and datum.inputs["advantages"][datum.inputs[RATIO_MASK] == 0].any():
            raise UserError(f"{where}.advantages: expected 0 where {RATIO_MASK} is 0")


def _check_values(
    where: str, name: str, values: np.ndarray, size: int, vocabulary: int | None
) -> None:
    if values.shape != (size,):
        shape = [*values.shape]
        raise UserError(f"{where}: expected a number for each of {size} tokens, found {shape}")
    if name not in ("model_input", TARGETS):
        if not np.isfinite(values).all():
            raise UserError(f"{where}: expected finite numbers, found NaN or infinity")
        return
    most = np.inf if vocabulary is None else vocabulary
    if values.dtype.kind != "i" or values.min() < 0 or values.max() >= most:
        raise UserError(f"{where}: expected token ids from 0 to {most - 1}")


def batch_of(data: Sequence[Datum], loss: Loss) -> g.Batch:
    """The rows as a batch whose every position counts, numbered by `row_b`.

    A ratio mask is in `keep_bt`, until the batch is split: see `counted`.
    """
    factor = "advantages" if "advantages" in loss.needs else "weights"
    targets = [datum.inputs[TARGETS] for datum in data]
    rows = [
        (datum.tokens[:1].tolist(), [*datum.tokens[1:].tolist(), int(target[-1])])
        for datum, target in zip(data, targets, strict=True)
    ]
    drawn = (
        [datum.inputs["logprobs"].tolist() for datum in data] if "logprobs" in loss.needs else None
    )
    ones = [np.ones(len(target)) for target in targets]
    factors = [datum.inputs.get(factor, one) for datum, one in zip(data, ones, strict=True)]
    batch = g.batch_of(rows, [each.tolist() for each in factors], logp=drawn)
    masks = [datum.inputs[RATIO_MASK] != 0 for datum in data] if RATIO_MASK in loss.needs else None
    return attrs.evolve(
        batch,
        targets_bt=_padded(targets).astype(mx.int32),
        old_logp_bt=batch.old_logp_bt if loss.by_old else None,
        keep_bt=None if masks is None else _padded(masks),
        row_b=mx.arange(len(data), dtype=mx.int32),
    )


def counted(piece: g.Batch) -> g.Batch:
    """A micro-batch in which the ratio mask, if there is one, chooses the tokens that count."""
    if piece.keep_bt is None:
        return piece
    return attrs.evolve(piece, mask_bt=piece.mask_bt & piece.keep_bt, keep_bt=None)


def _padded(rows: Sequence[np.ndarray]) -> mx.array:
    width = max(map(len, rows))
    return mx.array(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
