"""Layers with few-bit weights, which choose how to compute a product by the number of rows.

mlx's quantized products read little memory, but on a CPU and on CUDA their time grows with each
row. Therefore, from `unpack_rows` rows on, the weight is unpacked for a dense product. Results are
the same, only a part of one layer is in memory at a time, and the cost of unpacking does not depend
on the rows.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import attrs
import mlx.core as mx

from grpo_fn.backends import enabled, number
from grpo_fn.compile import recomputed

PART_BYTES = 64e6  # bytes of a weight unpacked at a time: a head may have gigabytes


def unpack_rows() -> int:
    """Returns the number of rows from which this machine unpacks a packed weight before the
    product; 0 means never.
    """
    return number("unpack_rows") if enabled("unpacked_products") else 0


def is_unpacked(x: mx.array, group_size: int) -> bool:
    """Returns whether a product of these rows, [...,width], and a packed weight unpacks the weight
    first.

    If a row of the weight is a single group, the weight is always unpacked: for such weights, the
    packed product of MLX 0.32.4 on CUDA is wrong for more than one row
    (benchmarks/architectures/upstream.md). These weights are small.
    """
    rows = x.size // x.shape[-1]
    return 0 < unpack_rows() <= rows or (x.shape[-1] == group_size and rows > 1)


@attrs.frozen
class QuantMode:
    """A quantized format supported by mlx."""

    mode: str  # affine | mxfp4 | mxfp8 | nvfp4
    bits: int
    group_size: int  # weights that share a scale

    @property
    def bits_stored(self) -> float:
        """Bits per weight, including the weight's share of an 8-bit scale or, in affine modes, of
        two 16-bit numbers.
        """
        return self.bits + (32 if self.mode == "affine" else 8) / self.group_size


def quantize(weight: mx.array, mode: QuantMode) -> dict[str, mx.array]:
    """Quantizes a matrix [out,in] to packed weights, scales and, in affine modes, biases."""
    packed = mx.quantize(weight, group_size=mode.group_size, bits=mode.bits, mode=mode.mode)
    return dict(zip(("weight", "scales", "biases"), packed, strict=False))


def dequantize(packed: Mapping[str, mx.array], mode: QuantMode, dtype: mx.Dtype) -> mx.array:
    """Returns the matrix that `quantize` has packed, up to rounding."""
    return mx.dequantize(
        packed["weight"],
        packed["scales"],
        packed.get("biases"),
        group_size=mode.group_size,
        bits=mode.bits,
        mode=mode.mode,
        dtype=dtype,
    )


@functools.cache
def unpacked_product(mode: QuantMode) -> Callable[..., mx.array]:
    """Creates a function (x, weight, scales[, biases]) -> x Wᵀ, x [...,in], that unpacks W [out,in]
    in parts.

    The backward pass unpacks W again; otherwise, all layers' weights would be in memory in full
    size. Packed weights have no gradient.
    """

    @mx.custom_function
    def product(x: mx.array, *packed: mx.array) -> mx.array:
        parts = [x @ weight.T for weight in _unpacked(packed, mode, x.dtype)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    @product.vjp
    def product_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        x, *packed = primals
        gradient = mx.zeros_like(x)
        start = 0
        for weight in _unpacked(recomputed(packed, cotangent), mode, x.dtype):
            stop = start + weight.shape[0]
            gradient = gradient + cotangent[..., start:stop] @ weight
            start = stop
        return (gradient, *[mx.zeros_like(array) for array in packed])

    return cast(Callable[..., mx.array], product)


def _unpacked(packed: Sequence[mx.array], mode: QuantMode, dtype: mx.Dtype) -> Iterable[mx.array]:
    """Unpacks the matrix from weights, scales and biases, in parts of some rows each."""
    out, words = packed[0].shape
    width = words * 32 // mode.bits
    rows = max(int(PART_BYTES / (width * dtype.size)), 1)
    for start in range(0, out, rows):
        part = [array[start : start + rows] for array in packed] if rows < out else packed
        yield dequantize(dict(zip(("weight", "scales", "biases"), part, strict=False)), mode, dtype)


def packed_names(name: str, mode: QuantMode) -> list[str]:
    """Returns the names of the leaves that replace the weight `name` when the weight is packed."""
    stem = name.removesuffix("weight")
    return [
        stem + part for part in ("weight", "scales", *(["biases"] if mode.mode == "affine" else []))
    ]
