"""Calibrated rounding, which rounds weights to few bits while preserving a layer's outputs on its
own inputs.

GPTQ (arXiv 2210.17323): the columns of a weight are rounded one after another, those with the
largest inputs first, and later columns compensate for each error according to the inputs' second
moments. Here, columns are rounded within blocks of at most `WIDTH` columns, so the moments of D
inputs need D·WIDTH numbers, and the blocks of all layers are rounded in parallel. Each group's
range is first shrunk to minimize the error. Formats and kernels are mlx's affine ones; only the
stored numbers differ.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.backends import compiled_step, find
from grpo_fn.layers import calls_noted
from grpo_fn.policy.layers.quantized_layers import QuantMode
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import Tree, flat, materialize

WIDTH = 1536  # most columns per block
TRACED = 64  # columns that one compiled program rounds
FACTORED = 64  # rows of a matrix that mlx itself factors
DAMPING = 0.1  # share by which each diagonal entry is increased: few tokens overstate correlations
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # factors for a group's range
PART = 2**26  # number of weights rounded at a time

# for each weight's inputs: Σ x xᵀ for each block of columns, float32 [N,W,W]
Moments = Mapping[str, mx.array]


@attrs.frozen(eq=False)
class Carry:
    """Factors that distribute rounding errors: computed once from the blocks' moments, and used by
    each rounding.
    """

    order_nw: mx.array  # order of each block's columns: the largest inputs first
    # row k: the shares of column k's error that later columns take over; bfloat16, in this order
    share_nww: mx.array
    weight_nw: mx.array  # weight of each column's squared error, in the original order of columns


# Of each weight: the carry of all layers with blocks of that width, and its layer's first block
# there.
Carries = Mapping[str, tuple[Carry, int]]


def input_moments(
    policy: Policy,
    params: Tree,
    tokens_bl: mx.array,
    lengths_b: mx.array,
    names: Sequence[str],
    group: int,
) -> dict[str, mx.array]:
    """Computes the second moments of inputs to these weights' layers, over rows of tokens; moments
    from several batches can be added.

    Args:
        policy, params: the model in full precision.
        tokens_bl: rows [B,L], padded on the right.
        lengths_b: number of unmasked tokens in each row.
        names: the weights; experts, and layers that are not called as a product, have no moments.
        group: weights that share a scale; blocks are whole groups.
    """
    counts_bl1 = (mx.arange(tokens_bl.shape[1])[None] < lengths_b[:, None])[..., None]
    found: dict[str, mx.array] = {}
    last: list[Any] = [None, None]  # layers that share inputs share moments

    def note(name: str, x: mx.array) -> None:
        if tuple(x.shape[:-1]) != tuple(tokens_bl.shape):  # for example, the tokens of an expert
            return
        if last[0] is not x:
            width = block_width(x.shape[-1], group)
            rows = (
                mx.where(counts_bl1, x, 0)
                .astype(mx.float32)
                .reshape(-1, x.shape[-1] // width, width)
            )
            last[:] = x, rows.transpose(1, 2, 0) @ rows.transpose(1, 0, 2)
        found[name] = last[1]

    with policy.bound(params) as module:
        layers = {f"{path}.weight": layer for path, layer in module.named_modules()}
        with calls_noted({name: layers[name] for name in names}, note):
            policy.split.hidden(module, tokens_bl)
    materialize(found)
    return found


def added(first: Moments, second: Moments) -> dict[str, mx.array]:
    """Adds two sets of moments; the first may be empty. Shared moments remain shared."""
    if not first:
        return dict(second)
    sums: dict[int, mx.array] = {}
    for name, found in first.items():
        if id(found) not in sums:
            sums[id(found)] = found + second[name]
    materialize(sums)
    return {name: sums[id(found)] for name, found in first.items()}


def folded(moments: Moments) -> Moments:
    """Converts moments to the form for saving: only upper triangles, [N,W/2,W+1]. Layers that share
    moments continue to share them.
    """
    kept = {id(found): _folded(found) for found in moments.values()}
    materialize(kept)
    return {name: kept[id(found)] for name, found in moments.items()}


def _folded(moments_nww: mx.array) -> mx.array:
    """Stores an upper triangle's lower half, rotated, below the diagonal of its upper half."""
    half = moments_nww.shape[-1] // 2
    upper = mx.pad(moments_nww[:, :half], [(0, 0), (0, 0), (1, 0)])
    lower = mx.pad(moments_nww[:, ::-1, ::-1][:, :half], [(0, 0), (0, 0), (0, 1)])
    return mx.where(mx.arange(2 * half + 1) > mx.arange(half)[:, None], upper, lower)


def _whole(moments: mx.array) -> mx.array:
    """Returns moments [N,W,W]; folded moments are unfolded."""
    if moments.shape[1] == moments.shape[2]:
        return moments
    triangle = mx.concatenate([moments[..., 1:], moments[:, ::-1, :-1][..., ::-1]], axis=1)
    return mx.triu(triangle) + mx.triu(triangle, k=1).transpose(0, 2, 1)


def block_width(columns: int, group: int) -> int:
    """Returns the largest block width that divides this number of columns: whole groups, at most
    `WIDTH` columns.
    """
    return max(
        w for w in range(group, max(min(columns, WIDTH), group) + 1, group) if columns % w == 0
    )


def carries_of(moments: Moments) -> Carries:
    """Computes the carries for the layers that have these moments. Layers that share inputs share
    carries.

    Blocks of the same width are factored in parallel, at most an eighth of them and `PART` numbers
    at a time, because several arrays of that size exist at once.
    """
    alike: dict[int, list[mx.array]] = {}
    places: dict[int, tuple[int, int]] = {}
    for found in moments.values():
        if id(found) not in places:
            width = 2 * found.shape[1] if found.shape[1] != found.shape[2] else found.shape[1]
            parts = alike.setdefault(width, [])
            places[id(found)] = width, sum(part.shape[0] for part in parts)
            parts.append(found)
    stacks = {width: _stacked(parts) for width, parts in alike.items()}
    return {name: (stacks[places[id(m)][0]], places[id(m)][1]) for name, m in moments.items()}


def _stacked(moments: Sequence[mx.array]) -> Carry:
    """Computes the carry for blocks from several layers."""
    moments_nww = mx.concatenate(list(moments)) if len(moments) > 1 else moments[0]
    blocks, width, _ = moments_nww.shape
    step = max(1, min(blocks // 8, PART // width**2))
    carries = [_carry_of(moments_nww[at : at + step]) for at in range(0, len(moments_nww), step)]
    fields = zip(*(attrs.astuple(carry, recurse=False) for carry in carries), strict=True)
    stack = Carry(*(mx.concatenate(list(arrays)) for arrays in fields))
    materialize(stack)
    return stack


def _carry_of(moments: mx.array) -> Carry:
    """Computes the carry for blocks with these moments: R divided by its diagonal, where H⁻¹ = RᵀR
    and R is upper triangular.
    """
    moments_nww = _whole(moments)
    diagonal_nw = mx.diagonal(moments_nww, axis1=1, axis2=2)
    damping_nw = DAMPING * diagonal_nw + 1e-6 * diagonal_nw.mean(axis=-1, keepdims=True) + 1e-12
    damped_nww = moments_nww + damping_nw[..., None] * mx.eye(moments_nww.shape[-1])
    order_nw = mx.argsort(-diagonal_nw, axis=-1)
    ordered_nww = _in_order(_in_order(damped_nww, order_nw).transpose(0, 2, 1), order_nw)
    # H = U Uᵀ with U upper triangular, by the Cholesky factor of H in reverse order; R = U⁻¹.
    root_nww = _inverse_root(ordered_nww[:, ::-1, ::-1])[:, ::-1, ::-1]
    pivot_nw = mx.diagonal(root_nww, axis1=1, axis2=2)
    weight_nw = mx.take_along_axis(1 / mx.square(pivot_nw), mx.argsort(order_nw, axis=-1), axis=-1)
    carry = Carry(order_nw, (root_nww / pivot_nw[..., None]).astype(mx.bfloat16), weight_nw)
    materialize(carry)
    return carry


def _inverse_root(h_nww: mx.array) -> mx.array:
    """Computes L⁻¹ for H = L Lᵀ, where L is lower triangular. The halves are inverted recursively,
    because mlx's function runs only on the CPU and is slow without a good BLAS.
    """
    half = h_nww.shape[-1] // 2
    if half < FACTORED:
        with mx.stream(mx.cpu):
            return mx.linalg.tri_inv(mx.linalg.cholesky(h_nww))
    first_nhh = _inverse_root(h_nww[:, :half, :half])
    below_noh = h_nww[:, half:, :half] @ first_nhh.transpose(0, 2, 1)
    second_noo = _inverse_root(h_nww[:, half:, half:] - below_noh @ below_noh.transpose(0, 2, 1))
    above_nho = mx.zeros((h_nww.shape[0], half, below_noh.shape[1]))
    lower_now = mx.concatenate([-(second_noo @ below_noh @ first_nhh), second_noo], axis=-1)
    return mx.concatenate([mx.concatenate([first_nhh, above_nho], axis=-1), lower_now], axis=1)


def _in_order(x_now: mx.array, order_nw: mx.array) -> mx.array:
    return mx.take_along_axis(x_now, order_nw[:, None], axis=-1)


def round_calibrated(
    weights: Mapping[str, mx.array], carries: Carries, mode: QuantMode
) -> dict[str, dict[str, mx.array]]:
    """Rounds matrices [out,in] to packed weights, scales and biases, like `quantize`, but
    compensates errors.

    Matrices of the same shape and dtype are rounded in parallel, at most `PART` weights at a time.

    Raises ValueError for a mode that is not affine.
    """
    if mode.mode != "affine":
        raise ValueError(f"calibrated rounding supports only affine formats; found {mode.mode}")
    alike: dict[Any, list[str]] = {}
    for name, weight in weights.items():
        alike.setdefault((tuple(weight.shape), weight.dtype), []).append(name)
    result = {}
    for (shape, _), names in alike.items():
        step = max(1, PART // (shape[0] * shape[1]))
        for some in [names[at : at + step] for at in range(0, len(names), step)]:
            stack = carries[some[0]][0]
            blocks = shape[1] // stack.order_nw.shape[-1]
            blocks_n = mx.array(
                flat(range(carries[name][1], carries[name][1] + blocks) for name in some)
            )
            packed = _packed(mx.stack([weights[name] for name in some]), stack, blocks_n, mode)
            materialize(packed)
            apart = (mx.split(array.flatten(0, 1), len(some)) for array in packed)  # views
            for name, *parts in zip(some, *apart, strict=True):
                result[name] = dict(zip(("weight", "scales", "biases"), parts, strict=True))
    return result


def _packed(w_loi: mx.array, carry: Carry, blocks_n: mx.array, mode: QuantMode) -> list[mx.array]:
    """Rounds L matrices that consist of N blocks; `blocks_n` are the blocks' indices in `carry`."""
    layers, out, columns = w_loi.shape
    width = carry.order_nw.shape[-1]
    w_lonw = w_loi.reshape(layers, out, columns // width, width)
    w_now = w_lonw.transpose(0, 2, 1, 3).reshape(-1, out, width)
    ranges = (find("group_ranges") or _ranges)(mode.bits, mode.group_size, w_loi.dtype, SHRINK)
    scale_nog, bias_nog = ranges(w_now, carry.weight_nw[blocks_n])
    codes_of = (find("round_columns") or _codes)(mode.bits, mode.group_size)
    codes_now = codes_of(w_now, scale_nog, bias_nog, blocks_n, carry.order_nw, carry.share_nww)
    codes, *rest = (
        x_now.reshape(layers, -1, *x_now.shape[1:]).transpose(0, 2, 1, 3).reshape(layers, out, -1)
        for x_now in (codes_now, scale_nog, bias_nog)
    )
    return [pack_codes(codes, mode.bits), *(array.astype(w_loi.dtype) for array in rest)]


# (w [N,O,W], its columns' groups [N,W], their share [N,W,W]) -> codes, uint8, and errors [N,O,W]
Columns = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]


@functools.cache
def _codes(bits: int, group: int) -> Callable[..., mx.array]:
    """Creates a function that returns codes [N,O,W], uint8, for w [N,O,W] and its groups' scales
    and biases [N,O,G].

    Its further arguments are the index of each block, [N], and the carry's `order_nw` and
    `share_nww`.
    """

    def one(
        scale_nog: mx.array, bias_nog: mx.array, w_no1: mx.array, groups_n1: mx.array, _: mx.array
    ) -> tuple[mx.array, mx.array]:
        scale_no1, bias_no1 = (_in_order(array, groups_n1) for array in (scale_nog, bias_nog))
        codes_no1 = mx.clip(mx.round((w_no1 - bias_no1) / scale_no1), 0, 2**bits - 1)
        return codes_no1.astype(mx.uint8), w_no1 - (codes_no1 * scale_no1 + bias_no1)

    few = compiled_step(  # thousands of small operations
        lambda scale, bias, w, groups, share: _rounded(
            w, groups, share, functools.partial(one, scale, bias), 1
        )
    )

    def codes(
        w_now: mx.array,
        scale_nog: mx.array,
        bias_nog: mx.array,
        blocks_n: mx.array,
        order_kw: mx.array,
        share_kww: mx.array,
    ) -> mx.array:
        order_nw = order_kw[blocks_n]
        w_now = _in_order(w_now.astype(mx.float32), order_nw)
        columns = functools.partial(few, scale_nog, bias_nog)
        codes_now, _ = _rounded(
            w_now, order_nw // group, share_kww[blocks_n].astype(mx.float32), columns
        )
        return _in_order(codes_now, mx.argsort(order_nw, axis=-1))

    return codes


def _rounded(
    w_now: mx.array, groups_nw: mx.array, share_nww: mx.array, columns: Columns, few: int = TRACED
) -> tuple[mx.array, mx.array]:
    """Returns codes and errors for W columns; the left half passes its error to the right half.
    `columns` rounds a few columns.
    """
    half = max(w_now.shape[-1] // 2 // few, 1) * few
    if w_now.shape[-1] <= few:
        return columns(w_now, groups_nw, share_nww)
    left = _rounded(
        w_now[..., :half], groups_nw[:, :half], share_nww[:, :half, :half], columns, few
    )
    rest_now = w_now[..., half:] - left[1] @ share_nww[:, :half, half:]
    right = _rounded(rest_now, groups_nw[:, half:], share_nww[:, half:, half:], columns, few)
    codes_now, errors_now = (
        mx.concatenate(list(both), axis=-1) for both in zip(left, right, strict=True)
    )
    return codes_now, errors_now


@functools.cache
def _ranges(
    bits: int, group: int, dtype: mx.Dtype, shrinks: Sequence[float]
) -> Callable[..., tuple[mx.array, mx.array]]:
    """Creates a function (w [N,O,W], weight [N,W]) -> scale and bias [N,O,G] for each group of
    columns.

    Scale and bias describe the group's range, multiplied by the factor in `shrinks` with the
    smallest weighted error, and are rounded to this dtype.
    """
    most = 2**bits - 1

    def ranges(w_now: mx.array, weight_nw: mx.array) -> tuple[mx.array, mx.array]:
        parts = w_now.astype(mx.float32), weight_nw[:, None]
        w_nogc, weight_n1gc = (mx.unflatten(x, -1, (-1, group)) for x in parts)
        low, high = w_nogc.min(axis=-1, keepdims=True), w_nogc.max(axis=-1, keepdims=True)
        best: list[mx.array] = []
        for shrink in shrinks:
            scale = mx.maximum(shrink * (high - low) / most, 1e-7).astype(dtype).astype(mx.float32)
            bias = (mx.round(shrink * low / scale) * scale).astype(dtype).astype(mx.float32)
            rounded = mx.clip(mx.round((w_nogc - bias) / scale), 0, most) * scale + bias
            error = (mx.square(w_nogc - rounded) * weight_n1gc).sum(axis=-1, keepdims=True)
            found = [error, scale, bias]
            best = (
                [mx.where(error < best[0], a, b) for a, b in zip(found, best, strict=True)]
                if best
                else found
            )
        return best[1][..., 0], best[2][..., 0]

    return compiled_step(ranges)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Packs codes [...,n] of 2, 3, 4, 6 or 8 bits like mlx: a little-endian stream of bits in
    uint32.
    """
    count = math.lcm(bits, 8) // bits  # fewest codes that fill whole bytes
    shifted = (codes[..., at::count].astype(mx.uint32) << bits * at for at in range(count))
    filled = functools.reduce(mx.bitwise_or, shifted)
    stream = mx.stack(
        [(filled >> 8 * at).astype(mx.uint8) for at in range(bits * count // 8)], axis=-1
    )
    return stream.reshape(*codes.shape[:-1], -1).view(mx.uint32)
