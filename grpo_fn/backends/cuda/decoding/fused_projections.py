"""Products of one input with several weights as one product, while a model samples on CUDA.

    x Qᵀ, x Kᵀ, x Vᵀ   =   x [Q, K, V]ᵀ

A product with few rows takes the host longer to launch (10 us) than the device to compute, which reads the
weights. Larger weights stay as they are, because they would be in memory twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cuda.decoding.decode_blocks import DecodeBlock
from grpo_fn.backends.mechanisms import DecodeForm
from grpo_fn.backends.shared_input import SIBLINGS, SharedInput
from grpo_fn.layers import NamedLayers, all_plain, replaced_layers

MOST_BYTES = 20e6  # of the weights of one product; the device reads as much in some 5 us


class Fused(SharedInput):
    """Weights [N,V,D] of N products."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.weight = mx.stack([layer.weight for layer in layers])

    def products(self, x: mx.array) -> Iterator[mx.array]:
        """x Wᵀ [...,V] of each weight."""
        count, out, width = self.weight.shape
        for part in mx.split(x.reshape(1, -1, width) @ self.weight.swapaxes(1, 2), count):
            yield part.reshape(*x.shape[:-1], out)


class FusedPart(nn.Module):
    """Replaces a layer; the first part holds the weights."""

    def __init__(self, fused: Fused, number: int) -> None:
        super().__init__()
        if number == 0:
            self.fused = fused
        self._take = partial(fused.take, number)  # no child of this module

    def __call__(self, x: mx.array) -> mx.array:
        return self._take(x)


@contextmanager
def fused_projections(module: nn.Module, rows: int = 1) -> Iterator[None]:
    """The module with sibling layers of one shape fused, until the end of the `with` block; on CUDA.

    They serve any number of `rows`.
    """
    found = fusable(module)
    parts = []
    for group in found:
        fused = Fused([layer for _, layer in group])
        parts += [(name, FusedPart(fused, number)) for number, (name, _) in enumerate(group)]
    mx.eval([part.parameters() for _, part in parts])
    with replaced_layers(module, parts, [pair for group in found for pair in group]):
        yield


def fusable(module: nn.Module, compute: mx.Dtype | None = None) -> list[NamedLayers]:
    """The sibling layers that `fused_projections` fuses; `compute`: if the weights were cast to it.

    Plain layers of one shape and without a bias that take the same input.
    """
    found: list[NamedLayers] = []
    whole = [f"{name}." for name, layer in module.named_modules() if isinstance(layer, DecodeBlock)]
    for name, parent in module.named_modules():
        if any(name.startswith(path) for path in whole):
            continue
        for names in SIBLINGS:
            group = [(f"{name}.{child}".lstrip("."), parent[child]) for child in names if child in parent]
            layers = [layer for _, layer in group]
            if len(group) < len(names) or not all_plain(layers):
                continue
            first = layers[0].weight
            if any(
                layer.weight.shape != first.shape or layer.weight.dtype != first.dtype for layer in layers
            ):
                continue
            if len(layers) * first.size * (compute or first.dtype).size <= MOST_BYTES:
                found.append(group)
    return found


def _fused_layers(module: nn.Module, compute: mx.Dtype | None) -> NamedLayers:
    return [pair for group in fusable(module, compute) for pair in group]


FORM = DecodeForm(fused_projections, _fused_layers)
