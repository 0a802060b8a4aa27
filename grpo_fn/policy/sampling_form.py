"""What a model is while it samples: the same function, with fewer products to launch.

unpacking  packed weights in full size, where they are small
merging    LoRA's and DoRA's adapters as part of the weights that they adapt
joining    products of one input with several weights as one, on CUDA
blocking   weights in blocks that one core multiplies by itself, where rows are decoded in `lanes`
rotation   rotary embeddings as a product, there as well
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cpu.blocked_weights import blockable, blocked_products
from grpo_fn.backends.cpu.rotary import rotations
from grpo_fn.backends.cuda.joined_products import joinable, joined_products
from grpo_fn.policy.merged_adapters import mergeable, merged_adapters
from grpo_fn.policy.unpacked_layers import unpacked_weights


@contextmanager
def sampling_form(module: nn.Module, *, lanes: bool = False) -> Iterator[nn.Module]:
    """The module in that form, until the end of the `with` block."""
    with ExitStack() as form:
        plain = form.enter_context(unpacked_weights(module))
        form.enter_context(merged_adapters(module))
        inside = {id(layer) for layer in module.modules()}
        for layer in plain:
            if id(layer) not in inside:  # merged: the layer with adapters is held until it is put back
                layer.update({"weight": mx.zeros(())})
        mx.eval([layer.parameters() for layer in plain])
        form.enter_context(joined_products(module))
        if lanes:
            form.enter_context(blocked_products(module))
            form.enter_context(rotations(module))
        yield module


def sampling_form_bytes(module: nn.Module, compute: mx.Dtype | None = None, *, lanes: bool = False) -> int:
    """What that form holds beside the module's own weights, of a model that computes in this dtype.

    None: in the dtype that each weight has. Nothing is computed: read off shapes.
    """
    with unpacked_weights(module, compute) as plain:
        layers = [layer.linear for _, layer in mergeable(module, compute)]
        merged = {id(layer) for layer in layers}
        layers += [layer for layer in plain if id(layer) not in merged]
        layers += [layer for group in joinable(module, compute) for _, layer in group]
        layers += [layer for group in blockable(module, compute) for _, layer in group] if lanes else []
        return sum(layer.weight.size * (compute or layer.weight.dtype).size for layer in layers)
