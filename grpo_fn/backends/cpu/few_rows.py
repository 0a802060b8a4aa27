"""Stores weights in blocks, which makes products with few rows faster while a model samples.

Before a product, OpenBLAS copies the matrix into another layout, which takes longer than the
product itself if there are few rows. On processors with AVX-512, OpenBLAS makes no copy for a
product of less than a million multiplications. Therefore, a weight [out,in] is stored as blocks
[N,in,W], and each block is multiplied separately.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cpu.blas import load_blas, processor_flags
from grpo_fn.backends.mechanisms import number
from grpo_fn.layers import replaced_layers

_SMALL = 1_000_000  # most multiplications for which OpenBLAS makes no copy
_WIDTHS = (64, 32, 16)  # block widths
_LEAST_ROWS = 8  # blocks are small enough for this many rows: others may join


def has_small_products() -> bool:
    """Returns whether the BLAS multiplies small matrices without a copy."""
    return "openblas" in str(load_blas().library) and "avx512f" in processor_flags()


@contextmanager
def decode_blocks(module: nn.Module, rows: int) -> Iterator[None]:
    """Inside the `with` block, the module's weights are stored in blocks, for products with this
    many rows.
    """
    old = [
        (path, layer)
        for path, layer in module.named_modules()
        if type(layer) in _BLOCKED and _width(layer.weight, rows)
    ]
    if sum(layer.weight.nbytes for _, layer in old) > number("block_bytes"):
        old = []
    with replaced_layers(module, [(path, _blocked(layer, rows)) for path, layer in old], old):
        yield


def _width(weight: mx.array, rows: int) -> int:
    """Returns the width of a weight's blocks, or 0 if the whole product is small or no block's
    product would be small.
    """
    out, inner = weight.shape
    most = _SMALL // (max(rows, _LEAST_ROWS) * inner)
    if out <= most or rows > number("block_rows") or weight.dtype != mx.float32:
        return 0
    return next((width for width in _WIDTHS if width <= most and not out % width), 0)


def _blocked(layer: Any, rows: int) -> nn.Module:
    new: Any = copy.copy(layer)  # shares the arrays
    new.__class__ = _BLOCKED[type(layer)]
    new.block_width = _width(layer.weight, rows)
    return new


def _product(layer: Any, x: mx.array) -> mx.array:
    """Computes x Wᵀ + b, block by block if that makes the products small."""
    x_nd = x.reshape(-1, x.shape[-1])
    if x_nd.size * layer.block_width > _SMALL:
        return layer.whole(x)
    if "_blocks" not in layer:  # at the first use: an embedding may have none
        blocks = layer.weight.reshape(-1, layer.block_width, x.shape[-1]).swapaxes(1, 2)
        layer["_blocks"] = mx.contiguous(blocks)
    y = (x_nd @ layer["_blocks"]).swapaxes(0, 1).reshape(*x.shape[:-1], -1)
    return y + layer["bias"] if "bias" in layer else y


_BLOCKED: dict[Any, Any] = {  # classes, by the class whose product they compute
    kind: type(kind.__name__, (kind,), {name: _product, "whole": getattr(kind, name)})
    for kind, name in ((nn.Linear, "__call__"), (nn.Embedding, "as_linear"))
}
