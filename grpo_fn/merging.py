"""Adapters as part of the weights that they adapt, for as long as a model samples.

    y = x Wᵀ + s (x A) B   =   x (W + s (A B)ᵀ)ᵀ      (LoRA, arXiv 2106.09685, section 4.1)

Three products for one: with few rows, reading and launching them is most of a decoding step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


@contextmanager
def merged_adapters(module: nn.Module) -> Iterator[None]:
    """The module with plain layers in place of LoRA's and DoRA's, until the end of the `with` block.

    Only over weights of float32, where it changes nothing but rounding: in 16 bits most of a young adapter
    would be rounded away, and packed weights would have to be packed anew. Beside the adapted weights their
    merged ones are in memory.
    """
    adapted = {name: layer for name, layer in module.named_modules() if _can_merge(layer)}
    merged = {name: layer.fuse() for name, layer in adapted.items()}
    mx.eval([layer.parameters() for layer in merged.values()])
    try:
        module.update_modules(tree_unflatten(list(merged.items())))
        yield
    finally:
        module.update_modules(tree_unflatten(list(adapted.items())))


def _can_merge(layer: nn.Module) -> bool:
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear

    if not isinstance(layer, (LoRALinear, DoRALinear)):
        return False
    base = layer.linear
    return isinstance(base, nn.Linear) and base.weight.dtype == mx.float32
