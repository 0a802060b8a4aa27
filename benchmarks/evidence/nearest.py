"""`grpo run` with bfloat16 weights rounded to the nearest, for comparison: no option of a run does this."""

from __future__ import annotations

import sys

import mlx.core as mx

from grpo_fn import rounding
from runners import cli


def to_nearest(x: mx.array, key: mx.array, dtype: mx.Dtype) -> mx.array:
    """As `stochastic_round`, without its draw."""
    return x.astype(dtype)


if __name__ == "__main__":
    rounding.stochastic_round = to_nearest
    cli.main(["run", *sys.argv[1:]])
