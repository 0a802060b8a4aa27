"""Calibrated rounding: few-bit weights that keep a layer's outputs on its own inputs.

GPTQ (arXiv 2210.17323): the columns of a weight are rounded one after another, and the error of each is
carried on to the later ones as the inputs' second moments say. Here this happens within blocks of at most
`WIDTH` columns: the moments of D inputs take D·WIDTH numbers, and the blocks of all layers are rounded side
by side. Ranges are shrunk to the least error. Formats and kernels are mlx's affine ones: only which numbers
are stored differs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy.layers.quantized_layers import QuantMode
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree, materialize

WIDTH = 512  # columns of a block, at most
DAMPING = 0.1  # share of a diagonal entry that is added to it: few tokens overstate correlations
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range
PART = 2**26  # weights that are rounded at a time

Moments = Mapping[str, mx.array]  # of each weight's inputs: Σ x xᵀ of each block of columns, float32 [N,W,W]


@attrs.frozen(eq=False)
class Carry:
    """How errors are carried on, from the moments of one layer. Made once; each rounding uses it again."""

    share_nww: mx.array  # row k: what later columns take over of column k's error; upper triangular, 1 on it
    weight_nw: mx.array  # of the squared errors of a column


def input_moments(
    policy: Policy, params: Tree, tokens_bl: mx.array, lengths_b: mx.array, names: Sequence[str], group: int
) -> dict[str, mx.array]:
    """Second moments of the inputs of these weights' layers over rows of tokens; moments of rows add up.

    Args:
        policy, params: the model in full precision.
        tokens_bl: rows [B,L], padded on the right.
        lengths_b: tokens of each row that count.
        names: weights; those of experts, and of layers that are not called as a product, get no moments.
        group: weights that share a scale; blocks are whole groups.
    """
    counts_bl1 = (mx.arange(tokens_bl.shape[1])[None] < lengths_b[:, None])[..., None]
    found: dict[str, mx.array] = {}
    last: list[Any] = [None, None]  # layers that share their inputs share the moments

    def note(name: str, x: mx.array) -> None:
        if x.ndim != 3:
            return
        if last[0] is not x:
            width = block_width(x.shape[-1], group)
            rows = mx.where(counts_bl1, x, 0).astype(mx.float32).reshape(-1, x.shape[-1] // width, width)
            last[:] = x, rows.transpose(1, 2, 0) @ rows.transpose(1, 0, 2)
        found[name] = last[1]

    with policy.bound(params) as module, _noted_inputs(module, names, note):
        policy.split.hidden(module, tokens_bl)
    materialize(found)
    return found


def added(first: Moments, second: Moments) -> dict[str, mx.array]:
    """Moments of the rows of both; an empty one counts nothing. Layers that share theirs still do."""
    if not first:
        return dict(second)
    sums: dict[int, mx.array] = {}
    for name, found in first.items():
        if id(found) not in sums:
            sums[id(found)] = found + second[name]
    materialize(sums)
    return {name: sums[id(found)] for name, found in first.items()}


def block_width(columns: int, group: int) -> int:
    """The widest block of at most `WIDTH` columns, in whole groups, that divides so many columns."""
    return max(w for w in range(group, max(min(columns, WIDTH), group) + 1, group) if columns % w == 0)


@contextmanager
def _noted_inputs(
    module: nn.Module, names: Sequence[str], note: Callable[[str, mx.array], None]
) -> Iterator[None]:
    """In the block, the layers of these weights call `note(name, x)` with their inputs."""
    layers = {f"{path}.weight": layer for path, layer in module.named_modules()}
    kinds = {name: type(layers[name]) for name in names}

    def noting(name: str, kind: Any) -> Any:
        def call(self: Any, x: mx.array, *rest: Any, **options: Any) -> mx.array:
            note(name, x)
            return kind.__call__(self, x, *rest, **options)

        return type(kind.__name__, (kind,), {"__call__": call})

    try:
        for name, kind in kinds.items():
            layers[name].__class__ = noting(name, kind)
        yield
    finally:
        for name, kind in kinds.items():
            layers[name].__class__ = kind


def carry_of(moments_nww: mx.array) -> Carry:
    """The carry for a layer with these moments: of H⁻¹ = RᵀR with R upper triangular, R over its diagonal."""
    with mx.stream(mx.cpu):
        diagonal_nw = mx.diagonal(moments_nww, axis1=1, axis2=2)
        damping_nw = DAMPING * diagonal_nw + 1e-6 * diagonal_nw.mean() + 1e-12
        damped_nww = moments_nww + damping_nw[..., None] * mx.eye(moments_nww.shape[-1])
        # H = U Uᵀ with U upper triangular, by the Cholesky factor of H in reverse order; R = U⁻¹.
        upper_nww = mx.linalg.cholesky(damped_nww[:, ::-1, ::-1])[:, ::-1, ::-1]
        inverse_nww = mx.linalg.tri_inv(upper_nww, upper=True)
        pivot_nw = mx.diagonal(inverse_nww, axis1=1, axis2=2)
        carry = Carry(inverse_nww / pivot_nw[..., None], 1 / mx.square(pivot_nw))
        materialize(carry)
    return carry


def round_calibrated(
    weights: Mapping[str, mx.array], carries: Mapping[str, Carry], mode: QuantMode
) -> dict[str, dict[str, mx.array]]:
    """Matrices [out,in] as packed weights, scales and biases, like `quantize`, with errors carried on.

    Matrices of one shape and dtype are rounded side by side, at most `PART` weights at a time.

    Raises ValueError for a mode that is not affine.
    """
    if mode.mode != "affine":
        raise ValueError(f"calibrated rounding has affine formats only; found {mode.mode}")
    alike: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault((tuple(weight.shape), weight.dtype), []).append(name)
    result = {}
    for (shape, dtype), names in alike.items():
        step = max(1, PART // (shape[0] * shape[1]))
        for some in [names[at : at + step] for at in range(0, len(names), step)]:
            width = carries[some[0]].weight_nw.shape[-1]
            share_nww = mx.concatenate([carries[name].share_nww for name in some])
            weight_n1w = mx.concatenate([carries[name].weight_nw for name in some])[:, None]
            stacked = mx.stack([weights[name] for name in some]).astype(mx.float32)
            w_now = _blocks(stacked, width)
            codes_now, _, *ranges = _rounded(w_now, share_nww, weight_n1w, mode, dtype)
            columns = [_joined(array, len(some)) for array in (codes_now, *ranges)]
            packed = [pack_codes(columns[0], mode.bits), *(array.astype(dtype) for array in columns[1:])]
            materialize(packed)
            for number, name in enumerate(some):
                parts = [array[number] for array in packed]
                result[name] = dict(zip(("weight", "scales", "biases"), parts, strict=True))
    return result


def _blocks(x_lod: mx.array, width: int) -> mx.array:
    layers, out, columns = x_lod.shape
    x_lonw = x_lod.reshape(layers, out, columns // width, width)
    return x_lonw.transpose(0, 2, 1, 3).reshape(-1, out, width)


def _joined(x_now: mx.array, layers: int) -> mx.array:
    blocks, out, width = x_now.shape
    return x_now.reshape(layers, blocks // layers, out, width).transpose(0, 2, 1, 3).reshape(layers, out, -1)


def _rounded(
    w_now: mx.array,
    share_nww: mx.array,
    weight_n1w: mx.array,
    mode: QuantMode,
    dtype: mx.Dtype,
    ranges: tuple[mx.array, mx.array] | None = None,
) -> tuple[mx.array, ...]:
    """Codes, errors, scales and biases of W columns; the left half leaves its error to the right one.

    `ranges`: scales and biases [N,O,1] of the group, if the columns are in a single one.
    """
    columns = w_now.shape[-1]
    if ranges is None and columns == mode.group_size:
        ranges = _ranges(w_now, weight_n1w, 2**mode.bits - 1, dtype)
    if ranges is not None and columns == 1:
        scale, bias = ranges
        codes = mx.clip(mx.round((w_now - bias) / scale), 0, 2**mode.bits - 1)
        return codes, w_now - (codes * scale + bias), scale, bias
    unit = 1 if ranges else mode.group_size
    half = columns // unit // 2 * unit
    left = _rounded(
        w_now[..., :half], share_nww[:, :half, :half], weight_n1w[..., :half], mode, dtype, ranges
    )
    rest = w_now[..., half:] - left[1] @ share_nww[:, :half, half:]
    right = _rounded(rest, share_nww[:, half:, half:], weight_n1w[..., half:], mode, dtype, ranges)
    codes, errors = (mx.concatenate(both, axis=-1) for both in zip(left[:2], right[:2], strict=True))
    if ranges:
        return codes, errors, *ranges
    return codes, errors, *(mx.concatenate(both, -1) for both in zip(left[2:], right[2:], strict=True))


def _ranges(w_nog: mx.array, weight_n1g: mx.array, most: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Scale and bias [N,O,1] of each group: of its range, shrunk to the least weighted error."""
    low, high = w_nog.min(axis=-1, keepdims=True), w_nog.max(axis=-1, keepdims=True)
    best: list[mx.array] = []
    for shrink in SHRINK:
        scale = mx.maximum(shrink * (high - low) / most, 1e-7).astype(dtype).astype(mx.float32)
        bias = (mx.round(shrink * low / scale) * scale).astype(dtype).astype(mx.float32)
        rounded = mx.clip(mx.round((w_nog - bias) / scale), 0, most) * scale + bias
        error = (mx.square(w_nog - rounded) * weight_n1g).sum(axis=-1, keepdims=True)
        found = [error, scale, bias]
        best = [mx.where(error < best[0], a, b) for a, b in zip(found, best, strict=True)] if best else found
    return best[1], best[2]


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Codes [...,n] of 3, 4, 6 or 8 bits as mlx packs them: a little-endian stream of bits, uint32."""
    per_word = 24 // bits if bits in (3, 6) else 32 // bits
    shift = mx.arange(per_word, dtype=mx.uint32) * bits
    split = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, per_word)
    words = mx.left_shift(split, shift).sum(axis=-1)
    if bits not in (3, 6):
        return words
    three = mx.right_shift(words[..., None], mx.arange(3, dtype=mx.uint32) * 8).astype(mx.uint8)
    return three.reshape(*codes.shape[:-1], -1).view(mx.uint32)
