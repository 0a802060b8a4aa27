"""Adapters merged into the weights that they adapt, while a model samples.

    y = x Wᵀ + s (x A) B   =   x (W + s (A B)ᵀ)ᵀ      (LoRA, arXiv 2106.09685, section 4.1)

This replaces three products by one. In a small model, launching them is most of a decoding step. In a large
model most of the time is for reading weights, and merged weights would need memory in addition: it is not
merged.

Weights of 16 bits are rounded stochastically. Rounding to nearest would remove a new adapter, which adds less
than half the distance between two such numbers. With stochastic rounding it is kept on average, and an
adapter of zeros changes no weight. The random draws are the same each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, number
from grpo_fn.layers import NamedLayers, is_linear, replaced_layers
from grpo_fn.rounding import stochastic_round

MOST_BYTES = 256e6  # of merged weights in float32


@contextmanager
def merged_adapters(module: nn.Module) -> Iterator[None]:
    """The module with plain layers in place of LoRA's and DoRA's, until the end of the `with` block.

    Packed weights are not merged: they would have to be packed again.
    """
    adapted = mergeable(module)
    merged = []
    for place, (name, layer) in enumerate(adapted):
        plain = _plain(layer, mx.random.key(place))
        mx.eval(plain.parameters())  # one by one: each is float32 temporarily
        merged.append((name, plain))
    with replaced_layers(module, merged, adapted):
        yield


def mergeable(module: nn.Module, compute: mx.Dtype | None = None) -> NamedLayers:
    """The adapters that `merged_adapters` merges, by path; `compute`: if the weights were cast to it."""
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear

    found = [
        (name, layer, compute or layer.linear.weight.dtype)
        for name, layer in module.named_modules()
        if type(layer) in (LoRALinear, DoRALinear) and is_linear(layer.linear)  # not packed
    ]
    sizes = {dtype.size for _, _, dtype in found}
    nbytes = sum(layer.linear.weight.size * dtype.size for _, layer, dtype in found)
    most = number("merged_16_bits") if sizes == {2} else MOST_BYTES
    if len(sizes) != 1 or nbytes > most or not enabled("merged_adapters"):
        return []
    return [(name, layer) for name, layer, _ in found]


def _plain(layer: Any, key: mx.array) -> nn.Linear:
    """A linear layer that computes what one with an adapter does."""
    weight = layer.linear.weight
    delta = (layer.scale * layer.lora_b.T).astype(mx.float32) @ layer.lora_a.T.astype(mx.float32)
    whole = weight.astype(mx.float32) + delta
    if "m" in layer:  # DoRA: a separate length for each row
        whole = (layer.m / mx.linalg.norm(whole, axis=1))[:, None].astype(mx.float32) * whole
    plain: Any = nn.Linear.__new__(nn.Linear)  # its constructor would draw from the global random state
    nn.Module.__init__(plain)
    plain.weight = whole if weight.dtype == mx.float32 else stochastic_round(whole, key, weight.dtype)
    if "bias" in layer.linear:
        plain.bias = layer.linear.bias
    return plain
