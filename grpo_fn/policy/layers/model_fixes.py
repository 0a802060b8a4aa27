"""Fixes faults in mlx-lm's experts, in one mlx-lm model, and in tables of positions. Only one
module instance changes.

MLX reads past the end of a table of learned positions, such as GPT-2's `wpe`, and a gradient writes
past it, which corrupts other arrays or crashes.
"""

import functools
from contextlib import suppress
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import CANNOT_CALL, calls_noted
from grpo_fn.trees import on_host

_PROBED = 3  # tokens
_SORTED_FROM = 64  # mlx-lm sorts pairs of token and expert from this number on


def fix_known_faults(module: nn.Module) -> None:
    """Fixes the known faults of the model; a second call has no effect."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    if type(module).__module__ == "mlx_lm.models.kimi_k3":
        _fix_kimi_k3(module)
    # mlx-lm's experts sort pairs of token and expert if there are 64 or more. If they are not
    # sorted, MLX's gradient with respect to the weights is an error on CUDA (0.32.4, float32, from
    # 64 × 96 on).
    _replace_classes(module, {kind: _sorting(kind) for kind in (SwitchGLU, SwitchMLP)})


def _replace_classes(module: nn.Module, classes: dict[type[Any], type[Any]]) -> None:
    for layer in cast("list[Any]", module.modules()):
        layer.__class__ = classes.get(type(layer), type(layer))


@functools.cache
def _sorting(kind: type[Any]) -> type[Any]:
    """Creates a class that repeats a small number of tokens in the learner's pass; only the first
    copy is used.
    """

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        copies = -(-_SORTED_FROM // max(indices.size, 1)) if self.training else 1
        if copies == 1:
            return kind.__call__(self, x, indices)
        copied = (mx.broadcast_to(each, (copies, *each.shape)) for each in (x, indices))
        return kind.__call__(self, *copied)[0]

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": __name__})


def _fix_kimi_k3(module: nn.Module) -> None:
    """Fixes kimi_k3. Outside training, its layer caches products of two weights at the first call
    and, on Metal, a compiled step with a layer's weights; neither is refreshed after an update.
    """
    from mlx_lm.models import kimi_k3

    class DecoderLayer(kimi_k3.KimiK3DecoderLayer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._attn_res_w_eff = None
            return super().__call__(*args, **kwargs)

    class TextModel(kimi_k3.KimiK3TextModel):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self._output_res_w_eff = None
            return super().__call__(*args, **kwargs)

    _replace_classes(
        module, {kimi_k3.KimiK3DecoderLayer: DecoderLayer, kimi_k3.KimiK3TextModel: TextModel}
    )
    for layer in module.modules():
        if isinstance(layer, kimi_k3.KimiK3DeltaAttention):
            layer._step = layer._decode_core


def bound_positions(module: nn.Module) -> int | None:
    """Returns the number of positions that the module has learned, or None if the module has no
    table of positions.

    A table is recognized because the model indexes it with the tokens' positions, in a call in
    which only the positions are evaluated. Afterwards, positions beyond the table, which occur only
    in padding, use its last row.
    """
    from mlx_lm.tuner.dora import DoRAEmbedding
    from mlx_lm.tuner.lora import LoRAEmbedding

    kinds = (nn.Embedding, nn.QuantizedEmbedding, LoRAEmbedding, DoRAEmbedding)
    tables: Any = {
        path: layer for path, layer in module.named_modules() if isinstance(layer, kinds)
    }
    if len(tables) < 2:
        return None
    taken: list[tuple[str, mx.array]] = []
    with (
        calls_noted(tables, lambda path, places: taken.append((path, places))),
        suppress(*CANNOT_CALL),
    ):
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
    """Returns whether `bound_positions` has identified the layer as a table of positions."""
    return "bounded" in vars(type(layer))


@functools.cache
def _bounded(kind: type[Any], last: int) -> type[Any]:
    """Creates a class that uses the row `last` for every position beyond `last`."""
    if "bounded" in vars(kind):
        return kind

    def call(self: Any, x: mx.array) -> mx.array:
        return kind.__call__(self, mx.minimum(x, last))

    same = {
        "computes_as": vars(kind).get("computes_as", kind),
        "__module__": __name__,
        "bounded": True,
    }
    return type(kind.__name__, (kind,), {"__call__": call, **same})
