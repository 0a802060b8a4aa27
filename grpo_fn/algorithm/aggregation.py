"""Aggregation: how the losses of tokens become one number, Σ of the rows over a denominator.

The learner accumulates sum and denominator separately and divides once, at the update. So any split of a
batch gives the same gradient. To add an aggregation: give it a line in AGGREGATIONS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx


class Aggregation(NamedTuple):
    """What the rows' losses are divided by, and whether each is first the mean of its counted tokens."""

    denominator: Callable[[mx.array, mx.array, Any], mx.array]  # (sequences, tokens, L_max) -> 0-d
    row_mean: bool = False
    needs_max_length: bool = False


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(lambda sequences, tokens, longest: sequences, row_mean=True),
    "token_mean": Aggregation(lambda sequences, tokens, longest: tokens),
    "constant": Aggregation(lambda sequences, tokens, longest: sequences * longest, needs_max_length=True),
    "sequence_sum_norm": Aggregation(lambda sequences, tokens, longest: sequences),
}


def check_max_length(aggregation: str, max_completion_length: int | None) -> None:
    """Raise ValueError if the aggregation divides by L_max and there is none."""
    needed = AGGREGATIONS[aggregation].needs_max_length
    if needed and (max_completion_length is None or max_completion_length < 1):
        raise ValueError(
            f"aggregation = {aggregation!r} needs max_completion_length >= 1; found {max_completion_length}"
        )
