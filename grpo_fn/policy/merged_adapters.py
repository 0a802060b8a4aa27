"""Adapters as part of the weights that they adapt, for as long as a model samples.

    y = x Wᵀ + s (x A) B   =   x (W + s (A B)ᵀ)ᵀ      (LoRA, arXiv 2106.09685, section 4.1)

Three products for one: in a small model, launching them is most of a decoding step. In a large one reading
its weights is, and the merged ones would be in memory beside them: it stays as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import NamedLayers, is_linear, replaced_layers

MOST_BYTES = 256e6  # of merged weights


@contextmanager
def merged_adapters(module: nn.Module) -> Iterator[None]:
    """The module with plain layers in place of LoRA's and DoRA's, until the end of the `with` block.

    Only over weights of float32, where it changes nothing but rounding: in 16 bits most of a young adapter
    would be rounded away, and packed weights would have to be packed anew.
    """
    adapted = mergeable(module)
    merged = [(name, layer.fuse()) for name, layer in adapted]
    mx.eval([layer.parameters() for _, layer in merged])
    with replaced_layers(module, merged, adapted):
        yield


def mergeable(module: nn.Module, compute: mx.Dtype | None = None) -> NamedLayers:
    """The adapters that `merged_adapters` merges, by path; `compute`: if the weights were cast to it."""
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear

    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if type(layer) in (LoRALinear, DoRALinear)
        and is_linear(layer.linear)  # not packed
        and (compute or layer.linear.weight.dtype) == mx.float32
    ]
    nbytes = sum(layer.linear.weight.size for _, layer in found) * mx.float32.size
    return found if nbytes <= MOST_BYTES else []
