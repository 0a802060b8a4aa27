"""Aggregation: how the losses of tokens become one number, Σ of the rows over a denominator.

The learner accumulates sum and denominator separately and divides once, at the update. So any split of a
batch gives the same gradient. To add an aggregation: give it a line in AGGREGATIONS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx


class Aggregation(NamedTuple):
    """A row's contribution to the sum, and the sum's denominator."""

    row: Callable[[mx.array, mx.array], mx.array]  # (Σ_t l of each row [B], its counted tokens [B]) -> [B]
    denominator: Callable[[mx.array, mx.array, Any], mx.array]  # (sequences, tokens, L_max) -> 0-d
    needs_max_length: bool = False


def _row_sum(sum_b: mx.array, length_b: mx.array) -> mx.array:
    return sum_b


def _row_mean(sum_b: mx.array, length_b: mx.array) -> mx.array:
    return sum_b / mx.maximum(length_b, 1)


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(_row_mean, lambda sequences, tokens, longest: sequences),
    "token_mean": Aggregation(_row_sum, lambda sequences, tokens, longest: tokens),
    "constant": Aggregation(_row_sum, lambda sequences, tokens, longest: sequences * longest, True),
    "sequence_sum_norm": Aggregation(_row_sum, lambda sequences, tokens, longest: sequences),
}


def check_max_length(aggregation: str, max_completion_length: int | None) -> None:
    """Raise ValueError if the aggregation divides by L_max and there is none."""
    needed = AGGREGATIONS[aggregation].needs_max_length
    if needed and (max_completion_length is None or max_completion_length < 1):
        raise ValueError(
            f"aggregation = {aggregation!r} needs max_completion_length >= 1; found {max_completion_length}"
        )
