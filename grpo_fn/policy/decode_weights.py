"""Converts a model's weights to the form used for decoding, which computes the same function with
fewer products.

- Packed weights are unpacked if the model is small. A decoding step has tens of rows, which is too
  many for products with packed weights and too few to unpack every weight in each step.
- Adapters are merged into the weights that they adapt:

      y = x Wᵀ + s (x A) B   =   x (W + s (A B)ᵀ)ᵀ      (LoRA, arXiv 2106.09685, section 4.1)

  In a small model, launching the three products is most of a decoding step. In a large model, most
  of the time is spent on reading weights, and merged weights would need additional memory, so
  nothing is merged. 16-bit weights are rounded stochastically: rounding to nearest would remove a
  new adapter, whose contribution is smaller than the rounding error. The random numbers are the
  same each time.
- On CUDA, each block becomes a single kernel; no weight is stored twice.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, find, number
from grpo_fn.layers import NamedLayers, empty, is_linear, is_packed, replaced_layers
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.layers.patched_layers import patch_layers
from grpo_fn.policy.layers.quantized_layers import QuantMode, dequantize
from grpo_fn.rounding import stochastic_round
from grpo_fn.trees import named_leaves

MOST_BYTES = 256e6  # of all unpacked weights of a model, and of all merged ones in float32


@contextmanager
def unpacked_weights(
    module: nn.Module, compute: mx.Dtype | None = None
) -> Iterator[list[nn.Module]]:
    """Inside the `with` block, the module has plain layers instead of packed layers.

    Nothing is replaced if the unpacked weights would be large, or if products with packed weights
    are fast for many rows (Metal). Nothing is computed yet. `compute` is the model's compute dtype;
    None means the leaves' own.

    Yields the plain layers.
    """
    packed = unpackable(module, compute)
    plain = [(path, _unpacked(layer, _dtype(layer, module, compute))) for path, layer in packed]
    with replaced_layers(module, plain, packed):
        yield [layer for _, layer in plain]


def unpackable(module: nn.Module, compute: mx.Dtype | None = None) -> NamedLayers:
    """Returns the packed layers that `unpacked_weights` unpacks, by path. Only shapes are used."""
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
    return next(
        (leaf.dtype for leaf in leaves if mx.issubdtype(leaf.dtype, mx.floating)), mx.float32
    )


def _unpacked(layer: Any, dtype: mx.Dtype) -> nn.Module:
    """Returns a plain layer with a packed layer's unpacked weights, which are not computed yet."""
    kind = nn.Embedding if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear
    plain: Any = kind.__new__(kind)  # its constructor would draw from the global random state
    nn.Module.__init__(plain)
    plain.weight = dequantize(layer, QuantMode(layer.mode, layer.bits, layer.group_size), dtype)
    if "bias" in layer:
        plain.bias = layer.bias
    plain.freeze()
    patch_layers(plain)
    return plain


@contextmanager
def merged_adapters(module: nn.Module) -> Iterator[None]:
    """Inside the `with` block, the module has plain layers instead of LoRA and DoRA layers.

    Adapters on packed weights are not merged, because the result would have to be packed again.
    """
    adapted = mergeable(module)
    merged = []
    for place, (name, layer) in enumerate(adapted):
        plain = _merged(layer, mx.random.key(place))
        mx.eval(plain.parameters())  # one by one: each is float32 temporarily
        merged.append((name, plain))
    with replaced_layers(module, merged, adapted):
        yield


def mergeable(module: nn.Module, compute: mx.Dtype | None = None) -> NamedLayers:
    """Returns the adapters, by path, that `merged_adapters` merges if the weights are cast to
    `compute`.
    """
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


def _merged(layer: Any, key: mx.array) -> nn.Linear:
    """Returns a linear layer that computes the same as this layer with an adapter."""
    weight = layer.linear.weight
    delta = (layer.scale * layer.lora_b.T).astype(mx.float32) @ layer.lora_a.T.astype(mx.float32)
    whole = weight.astype(mx.float32) + delta
    if "m" in layer:  # DoRA: a separate length for each row
        whole = (layer.m / mx.linalg.norm(whole, axis=1))[:, None].astype(mx.float32) * whole
    # its constructor would draw from the global random state
    plain: Any = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(plain)
    plain.weight = (
        whole if weight.dtype == mx.float32 else stochastic_round(whole, key, weight.dtype)
    )
    if "bias" in layer.linear:
        plain.bias = layer.linear.bias
    return plain


@contextmanager
def decode_weights(module: nn.Module, rows: int = 1) -> Iterator[nn.Module]:
    """Inside the `with` block, the module's weights are in the form that decodes `rows` rows at a
    time fastest.
    """
    with ExitStack() as stack:
        plain = stack.enter_context(unpacked_weights(module))
        stack.enter_context(merged_adapters(module))
        present = {id(layer) for layer in module.modules()}
        for layer in plain:
            # merged: the layer with adapters is kept until it is restored
            if id(layer) not in present:
                empty(layer, {"weight": layer["weight"]})
        mx.eval([layer.parameters() for layer in plain])
        as_kernels = find("decode_blocks")
        if as_kernels is not None:
            stack.enter_context(as_kernels(module, rows))
        yield module


def decode_weights_bytes(module: nn.Module, compute: mx.Dtype | None = None) -> int:
    """Returns the number of additional bytes that `decode_weights` needs if the model computes in
    this dtype.

    A dtype of None means each weight's own dtype. Only shapes are used; nothing is computed.
    """
    with unpacked_weights(module, compute) as plain:
        layers = [layer.linear for _, layer in mergeable(module, compute)]
        merged = {id(layer) for layer in layers}
        layers += [layer for layer in plain if id(layer) not in merged]
        return sum(layer.weight.size * (compute or layer.weight.dtype).size for layer in layers)


def supports_compiled_decode(module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Determines by a trial whether this machine's compiled decoding steps support a model that
    shares prefixes.

    `compute` is the model's compute dtype; None means the weights' own dtype.
    """
    program = find("kernel_steps")
    if program is None:
        return False
    with unpacked_weights(module, compute):
        return program.takes(module, plain_caches(module))
