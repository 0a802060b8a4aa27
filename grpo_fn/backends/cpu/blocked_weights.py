"""Weights in blocks that a BLAS multiplies on one core each, for as long as a model samples on a CPU.

    x W  =  Σ_c x_c [W_c1, W_c2, …]        x_c: 256 columns of x; W_cn: 256 × 64 of W

A product with few rows takes a BLAS about as long to pack the weights as to multiply by them, and it asks all
cores for it. Small blocks need neither: each core can decode rows of its own (`lanes`). Weights that take the
same input are one product, as in `shared_input`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.mechanisms import DecodeForm, number
from grpo_fn.backends.shared_input import SIBLINGS, SharedInput
from grpo_fn.layers import NamedLayers, is_linear, is_one_token, is_packed, replaced_layers

ROWS, WIDTH = 16, 256  # of one block's product, at most
# Rows · width · columns up to which OpenBLAS keeps a product on one thread (interface/gemm.c: 4 · 2^16).
PRODUCT = 2**18
LEAST, LEAST_WIDTH = 16, 64  # columns, and columns of the input: smaller blocks are not worth it
MOST_BYTES = 256e6  # of all blocks of a model


class Blocks(SharedInput):
    """Weights of layers with one input, as blocks.

    `blocks` is [N,K,V/N], or [C,1,N,K/C,V/N] where the input is cut as well.
    """

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        blocks = mx.concatenate([_blocks(layer.weight, _columns(layers)) for layer in layers], axis=1)
        self.blocks = blocks[0] if blocks.shape[0] == 1 else blocks[:, None]
        if any("bias" in layer for layer in layers):
            biases = [layer.bias if "bias" in layer else mx.zeros(layer.weight.shape[:1]) for layer in layers]
            self.bias = mx.concatenate(biases).reshape(-1, 1, self.blocks.shape[-1])
        self._size = layers[0].weight.shape[1]
        self._widths = [layer.weight.shape[0] for layer in layers]

    def products(self, x: mx.array) -> Iterator[mx.array]:
        """x Wᵀ + b [...,V] of each layer."""
        width, columns = self.blocks.shape[-2:]
        rows = x.size // self._size
        few = rows if rows <= ROWS else math.gcd(rows, ROWS)
        if self.blocks.ndim == 3:
            out_mnrv = x.reshape(-1, 1, few, width) @ self.blocks
        else:
            x_m1rck = x.reshape(rows // few, 1, few, -1, width)
            out_mnrv = (x_m1rck.transpose(3, 0, 1, 2, 4) @ self.blocks).sum(axis=0)
        out_mnrv = out_mnrv + self.bias if "bias" in self else out_mnrv
        start = 0
        for wide in self._widths:
            stop = start + wide // columns
            part = out_mnrv if len(self._widths) == 1 else out_mnrv[:, start:stop]
            yield part.swapaxes(1, 2).reshape(*x.shape[:-1], wide)
            start = stop


class BlockedPart(nn.Module):
    """A layer, with blocks for decoding steps; the first of those that share them holds them."""

    def __init__(self, layer: Any, blocks: Blocks, number: int) -> None:
        super().__init__()
        self.layer = layer
        if number == 0:
            self.shared = blocks
        self._take = partial(blocks.take, number)  # no child of this module

    def __call__(self, x: mx.array) -> mx.array:
        # Of an embedding it is the index, and the head below that is in blocks.
        if not is_one_token(x) or isinstance(self.layer, nn.Embedding):
            return cast(mx.array, self.layer(x))
        return self._take(x)

    @property
    def weight(self) -> mx.array:
        """For models that reach for it themselves."""
        return cast(mx.array, self.layer.weight)

    def as_linear(self, x: mx.array) -> mx.array:
        """An embedding as the head."""
        return self._take(x) if is_one_token(x) else cast(mx.array, self.layer.as_linear(x))


@contextmanager
def blocked_products(module: nn.Module) -> Iterator[None]:
    """The module with its products in blocks, until the end of the `with` block; as it is without any."""
    found = blockable(module)
    parts = []
    for group in found:
        blocks = Blocks([layer for _, layer in group])
        parts += [(name, BlockedPart(layer, blocks, number)) for number, (name, layer) in enumerate(group)]
    mx.eval([part.shared.parameters() for _, part in parts if "shared" in part])
    with replaced_layers(module, parts, [pair for group in found for pair in group]):
        yield


def blockable(module: nn.Module, compute: mx.Dtype | None = None) -> list[NamedLayers]:
    """The layers that `blocked_products` puts in blocks, those of one input together, by path.

    Plain layers of float32 (`compute`: if they were cast to it) whose sizes divide into blocks, and an
    embedding that may be the head. None at all where the blocks would be large.
    """
    if not takes_blocks(module, compute):
        return []
    layers = {name: layer for name, layer in _plain(module, compute) if _divides([layer])}
    found: list[NamedLayers] = []
    for name in list(layers):
        parent, _, own = name.rpartition(".")
        names = next((names for names in SIBLINGS if own in names), (own,))
        paths = [f"{parent}.{child}".lstrip(".") for child in names]
        group = [(path, layers[path]) for path in paths if path in layers]
        if len(group) == len(names) and _divides([layer for _, layer in group]):
            found += [group] if own == names[0] else []
        else:
            found.append([(name, layers[name])])
    return found


def takes_blocks(module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Whether blocks of the module's products are small enough to be held beside them; or it has none.

    Not so with packed weights, which are too large to be unpacked for the rollout where they still are: each
    lane would unpack them for itself.
    """
    if number("unpack_rows") and any(is_packed(layer) for layer in module.modules()):
        return False
    return sum(layer.weight.size for _, layer in _plain(module, compute)) * mx.float32.size <= MOST_BYTES


def _plain(module: nn.Module, compute: mx.Dtype | None) -> Iterator[tuple[str, Any]]:
    found = [(name, layer) for name, layer in module.named_modules() if hasattr(layer, "weight")]
    linear = [(name, layer) for name, layer in found if is_linear(layer)]
    shapes = {layer.weight.shape for _, layer in linear}
    # Where a layer has the shape of an embedding, that layer is the head.
    tied = [
        (name, layer)
        for name, layer in found
        if type(layer) is nn.Embedding and layer.weight.shape not in shapes
    ]
    return ((n, layer) for n, layer in linear + tied if (compute or layer.weight.dtype) == mx.float32)


def _divides(layers: list[Any]) -> bool:
    """Whether these, as layers of one input, come in blocks of a size that pays."""
    width = layers[0].weight.shape[1]
    if any(layer.weight.shape[1] != width for layer in layers):
        return False
    return _width(width) >= min(width, LEAST_WIDTH) and _columns(layers) >= LEAST


def _columns(layers: list[Any]) -> int:
    """Of a block of weights [V,K] of one K."""
    width = _width(layers[0].weight.shape[1])
    return divisor(math.gcd(*(layer.weight.shape[0] for layer in layers)), PRODUCT // (ROWS * width))


def _width(width: int) -> int:
    return divisor(width, WIDTH)


def divisor(number: int, most: int) -> int:
    """The largest of a number's divisors that is not above `most`; 1 at least."""
    return next(n for n in range(most, 0, -1) if number % n == 0)


def _blocks(weight_vk: mx.array, columns: int) -> mx.array:
    out, width = weight_vk.shape
    part = _width(width)
    return mx.contiguous(
        weight_vk.reshape(out // columns, columns, width // part, part).transpose(2, 0, 3, 1)
    )


def _blocked_layers(module: nn.Module, compute: mx.Dtype | None) -> NamedLayers:
    return [pair for group in blockable(module, compute) for pair in group]


FORM = DecodeForm(blocked_products, _blocked_layers)
