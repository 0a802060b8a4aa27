"""Tables of learned positions, GPT-2's `wpe`: how many there are, and no lookup outside of them.

MLX reads past the end of a table, and a gradient writes there: numbers of other arrays, NaN, or a crash.
"""

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def bound_positions(module: nn.Module) -> int | None:
    """How many positions the module has learned; None: it has no table of positions.

    mlx-lm's models that have one (gpt2, gpt_bigcode) call it `wpe`. From then on places behind the table,
    which only padding may have, take its last row.
    """
    tables: list[Any] = [layer for path, layer in module.named_modules() if path.split(".")[-1] == "wpe"]
    sizes = [getattr(table, "embedding", table)["weight"].shape[0] for table in tables]
    for table, rows in zip(tables, sizes, strict=True):
        table.__class__ = _bounded(type(table), rows - 1)
    return min(sizes, default=None)


def is_position_table(layer: Any) -> bool:
    """Whether `bound_positions` has found the layer to be one."""
    return "bounded" in vars(type(layer))


@functools.cache
def _bounded(kind: type[Any], last: int) -> type[Any]:
    """A class that takes row `last` for every place behind it."""
    if "bounded" in vars(kind):
        return kind

    def call(self: Any, x: mx.array) -> mx.array:
        return kind.__call__(self, mx.minimum(x, last))

    same = {"computes_as": vars(kind).get("computes_as", kind), "__module__": __name__, "bounded": True}
    return type(kind.__name__, (kind,), {"__call__": call, **same})
