"""Tables of learned positions, such as GPT-2's `wpe`: how many there are, and no lookup outside of them.

MLX reads past the end of a table, and a gradient writes there: numbers of other arrays, NaN, or a crash.
"""

import functools
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import CANNOT_CALL, calls_noted
from grpo_fn.trees import on_host

_PROBED = 3  # tokens


def bound_positions(module: nn.Module) -> int | None:
    """How many positions the module has learned; None: it has no table of positions.

    A table is one whose rows are taken by the tokens' places. A call shows it, of which only the places are
    computed. From then on places behind the table, which only padding may have, take its last row.
    """
    from mlx_lm.tuner.dora import DoRAEmbedding
    from mlx_lm.tuner.lora import LoRAEmbedding

    kinds = (nn.Embedding, nn.QuantizedEmbedding, LoRAEmbedding, DoRAEmbedding)
    tables: Any = {path: layer for path, layer in module.named_modules() if isinstance(layer, kinds)}
    if len(tables) < 2:
        return None
    taken: list[tuple[str, mx.array]] = []
    with calls_noted(tables, lambda path, places: taken.append((path, places))), suppress(*CANNOT_CALL):
        module(mx.zeros((1, _PROBED), mx.int32))
    most: list[int] = []
    for path, places in taken:
        table = tables[path]
        found = on_host(places.reshape(-1)) if places.size == _PROBED else []
        if found and found == list(range(found[0], found[0] + _PROBED)):
            rows = getattr(table, "embedding", table)["weight"].shape[0]
            most.append(rows - found[0])
            table.__class__ = _bounded(type(table), rows - 1)
    return min(most, default=None)


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
