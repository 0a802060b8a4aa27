"""Layers that hold few-bit weights, and choose by the number of rows how to multiply with them.

mlx's quantized products read little memory, but on a CPU and on CUDA their time grows with each row. From
`unpack_rows` rows on the weight is therefore unpacked for the one product, and a dense product taken with it:
the same numbers, memory for one layer at a time, and a cost that does not grow.
"""

import copy
from collections.abc import Iterable, Mapping

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.trees import from_names


@attrs.frozen
class QuantMode:
    """One of mlx's quantized formats."""

    mode: str  # affine | mxfp4 | mxfp8 | nvfp4
    bits: int
    group_size: int  # weights that share a scale


def quantize(weight: mx.array, mode: QuantMode) -> dict[str, mx.array]:
    """A matrix [out,in] as packed weights, scales and, in affine modes, biases."""
    packed = mx.quantize(weight, group_size=mode.group_size, bits=mode.bits, mode=mode.mode)
    return dict(zip(("weight", "scales", "biases"), packed, strict=False))


def dequantize(packed: Mapping[str, mx.array], mode: QuantMode, dtype: mx.Dtype) -> mx.array:
    """The matrix that `quantize` stands for."""
    return mx.dequantize(
        packed["weight"],
        packed["scales"],
        packed.get("biases"),
        group_size=mode.group_size,
        bits=mode.bits,
        mode=mode.mode,
        dtype=dtype,
    )


def packed_names(name: str, mode: QuantMode) -> list[str]:
    """The leaves that stand for the weight `name` once it is packed."""
    stem = name.removesuffix("weight")
    return [stem + part for part in ("weight", "scales", *(["biases"] if mode.mode == "affine" else []))]


def packed_module(
    module: nn.Module,
    names: Iterable[str],
    leaves: Mapping[str, mx.array],
    mode: QuantMode,
    dtype: mx.Dtype | None,
    unpack_rows: int,
) -> nn.Module:
    """A copy of the module's structure, without weights, with packed layers in place of the named ones.

    Args:
        module: stays as it is.
        names: of the weights that are packed, each of an `nn.Linear` or `nn.Embedding`.
        leaves: the module's parameters by name.
        mode: their format.
        dtype: what an embedding unpacks to; None: its own dtype.
        unpack_rows: see the module's docstring; 0: never.
    """
    saved = module.parameters()
    module.update(from_names({name: mx.zeros(()) for name in leaves}))
    try:
        structure = copy.deepcopy(module)
    finally:
        module.update(saved)
    parts = dict(structure.named_modules())
    replaced = []
    for name in names:
        path = name.removesuffix(".weight")
        kind = _PackedEmbedding if isinstance(parts[path], nn.Embedding) else _PackedLinear
        layer = kind(mode, dtype or leaves[name].dtype, unpack_rows, f"{path}.bias" in leaves)
        replaced.append((path, layer))
    structure.update_modules(tree_unflatten(replaced))
    return structure


class _Packed(nn.Module):
    """What linear layers and embeddings have in common; `bits` is what mlx-lm knows such layers by."""

    def __init__(self, mode: QuantMode, dtype: mx.Dtype, unpack_rows: int, bias: bool) -> None:
        super().__init__()
        self.mode, self.bits, self.group_size = mode.mode, mode.bits, mode.group_size
        self._mode, self._dtype, self._unpack_rows = mode, dtype, unpack_rows
        for name in packed_names("weight", mode) + ["bias"] * bias:
            self[name] = mx.zeros(())

    def product(self, x: mx.array) -> mx.array:
        """x [..., in] times the weight's transpose."""
        rows = x.size // x.shape[-1]
        if self._unpack_rows and rows >= self._unpack_rows:
            return x @ dequantize(self, self._mode, x.dtype).T
        return mx.quantized_matmul(
            x,
            self["weight"],
            scales=self["scales"],
            biases=self.get("biases"),
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


class _PackedLinear(_Packed):
    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        return y + self["bias"] if "bias" in self else y


class _PackedEmbedding(_Packed):
    def __call__(self, tokens: mx.array) -> mx.array:
        rows = {name: self[name][tokens] for name in packed_names("weight", self._mode)}
        return dequantize(rows, self._mode, self._dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """The head of a model that ties it to its embedding."""
        return self.product(x)
