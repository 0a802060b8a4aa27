"""Packed weights in full size while a model samples, if they are small enough.

A decoding step has tens of rows: too many for products with packed weights, too few to unpack every weight
again each time. Unpacked once per rollout they are plain layers, and adapters can be merged into them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, number
from grpo_fn.layers import NamedLayers, is_packed, replaced_layers
from grpo_fn.policy.layers.patched_layers import patch_layers
from grpo_fn.policy.layers.quantized_layers import QuantMode, dequantize
from grpo_fn.trees import named_leaves

MOST_BYTES = 256e6  # of all unpacked weights of a model


@contextmanager
def unpacked_weights(module: nn.Module, compute: mx.Dtype | None = None) -> Iterator[list[nn.Module]]:
    """The module with plain layers in place of packed ones, until the end of the `with` block.

    None are replaced if they would be large, or if products with packed weights are fast for many rows
    (Metal). Nothing is computed yet. `compute` is the model's compute dtype; None: that of its leaves.

    Yields the plain layers.
    """
    packed = unpackable(module, compute)
    plain = [(path, _plain(layer, _dtype(layer, module, compute))) for path, layer in packed]
    with replaced_layers(module, plain, packed):
        yield [layer for _, layer in plain]


def unpackable(module: nn.Module, compute: mx.Dtype | None = None) -> NamedLayers:
    """The packed layers that `unpacked_weights` unpacks, by path; found from shapes."""
    found = [(path, layer) for path, layer in module.named_modules() if is_packed(layer)]
    nbytes = sum(_size(layer) * _dtype(layer, module, compute).size for _, layer in found)
    pays = enabled("unpacked_weights") and number("unpack_rows") > 0
    return found if pays and nbytes <= MOST_BYTES else []


def _size(layer: Any) -> int:
    return layer.weight.size * 32 // layer.bits


def _dtype(layer: Any, module: nn.Module, compute: mx.Dtype | None) -> mx.Dtype:
    if compute is not None or mx.issubdtype(layer.scales.dtype, mx.floating):
        return compute or layer.scales.dtype
    # Scales of the mx formats are integers.
    leaves = named_leaves(module.parameters()).values()
    return next((leaf.dtype for leaf in leaves if mx.issubdtype(leaf.dtype, mx.floating)), mx.float32)


def _plain(layer: Any, dtype: mx.Dtype) -> nn.Module:
    """A plain layer with a packed layer's unpacked weights; not computed."""
    kind = nn.Embedding if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear
    plain: Any = kind.__new__(kind)  # its constructor would draw from the global random state
    nn.Module.__init__(plain)
    plain.weight = dequantize(layer, QuantMode(layer.mode, layer.bits, layer.group_size), dtype)
    if "bias" in layer:
        plain.bias = layer.bias
    plain.freeze()
    patch_layers(plain)
    return plain
