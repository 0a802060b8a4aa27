"""A model's weights as used for decoding: the same function, with fewer products to launch.

unpacked_layers     packed weights in full size, if they are small
merged_adapters     LoRA's and DoRA's adapters as part of the weights that they adapt
decode_blocks       whole blocks as one kernel each, on CUDA; nothing is in memory twice
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import find
from grpo_fn.layers import empty
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.decoding.merged_adapters import mergeable, merged_adapters
from grpo_fn.policy.decoding.unpacked_layers import unpacked_weights


@contextmanager
def decode_weights(module: nn.Module, rows: int = 1) -> Iterator[nn.Module]:
    """The module with these weights for that many rows at a time, until the end of the `with` block."""
    with ExitStack() as stack:
        plain = stack.enter_context(unpacked_weights(module))
        stack.enter_context(merged_adapters(module))
        present = {id(layer) for layer in module.modules()}
        for layer in plain:
            if id(layer) not in present:  # merged: the layer with adapters is kept until it is restored
                empty(layer, {"weight": layer["weight"]})
        mx.eval([layer.parameters() for layer in plain])
        as_kernels = find("decode_blocks")
        if as_kernels is not None:
            stack.enter_context(as_kernels(module, rows))
        yield module


def decode_weights_bytes(module: nn.Module, compute: mx.Dtype | None = None) -> int:
    """Bytes of these weights in addition to the module's own, for a model that computes in this dtype.

    None: each weight's own dtype. Nothing is computed; the shapes are enough.
    """
    with unpacked_weights(module, compute) as plain:
        layers = [layer.linear for _, layer in mergeable(module, compute)]
        merged = {id(layer) for layer in layers}
        layers += [layer for layer in plain if id(layer) not in merged]
        return sum(layer.weight.size * (compute or layer.weight.dtype).size for layer in layers)


def supports_compiled_decode(module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Whether this machine's compiled decoding steps support the model, which shares prefixes: by trying.

    `compute` is its compute dtype; None: that of its weights.
    """
    program = find("kernel_steps")
    if program is None:
        return False
    with unpacked_weights(module, compute):
        return program.takes(module, plain_caches(module))
