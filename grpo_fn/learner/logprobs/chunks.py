"""Functions of all logits of a batch, with the logits of a chunk of positions in memory at a time."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from grpo_fn.trees import Tree, arrays_of, map_arrays

# (head params, hidden_cd, the positions' constants) -> columns [C]
ForwardChunk = Callable[[Tree, mx.array, mx.array], list[mx.array]]
# (head params, hidden_cd, constants, columns, their cotangents) -> the gradients of hidden_cd and params
BackwardChunk = Callable[[Tree, mx.array, mx.array, list[mx.array], list[mx.array]], tuple[mx.array, Tree]]


def in_chunks(forward: ForwardChunk, backward: BackwardChunk, constants_n: mx.array, chunk: int) -> Any:
    """A custom function (hidden_nd, head params) -> columns [N], `chunk` positions at a time, forward and
    backward. No gradient flows to `constants_n`, [N] or [N,…]."""
    starts = range(0, constants_n.shape[0], chunk)

    @mx.custom_function
    def compute(hidden_nd: mx.array, params: Tree) -> list[mx.array]:
        parts: list[list[mx.array]] = []
        for start in starts:
            h_cd = hidden_nd[start : start + chunk]
            if parts:  # one chunk's logits at a time
                h_cd = mx.depends(h_cd, parts[-1])
            parts.append(forward(params, h_cd, constants_n[start : start + chunk]))
        return [mx.concatenate(list(column)) for column in zip(*parts, strict=True)]

    @compute.vjp
    def compute_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        hidden_nd, params = primals
        trains = any(True for _ in arrays_of(params))
        dh_parts: list[mx.array] = []
        dparams: Tree = params
        for start in starts:
            rows = slice(start, start + chunk)
            h_cd = hidden_nd[rows]
            ct, out = [c[rows] for c in cotangents], [o[rows] for o in outputs]
            if dh_parts:  # an order, so that the gradient of the weights grows in place, chunk after chunk
                h_cd = mx.depends(h_cd, [dh_parts[-1], *(arrays_of(dparams) if trains else ())])
            dh_cd, grads = backward(params, h_cd, constants_n[rows], out, ct)
            if len(starts) > 1:  # many small sums: in float32, whatever the weights' dtype
                grads = map_arrays(lambda dw: dw.astype(mx.float32), grads)
            dparams = tree_map(mx.add, dparams, grads) if dh_parts and trains else grads
            dh_parts.append(dh_cd)
        if not trains:
            return mx.concatenate(dh_parts), params
        return mx.concatenate(dh_parts), tree_map(lambda dw, w: dw.astype(w.dtype), dparams, params)

    return compute


def autodiff(
    forward: ForwardChunk, params: Tree, h_cd: mx.array, constants_c: mx.array, ct: list[mx.array]
) -> tuple[mx.array, Tree]:
    """A chunk's gradient by plain differentiation, for functions without one in closed form."""

    def inner(h_cd: mx.array, params: Tree) -> mx.array:
        outs = forward(params, h_cd, constants_c)
        return sum(((o * c).sum() for o, c in zip(outs, ct, strict=True)), start=mx.array(0.0))

    if not any(True for _ in arrays_of(params)):
        return mx.grad(inner)(h_cd, params), params
    return mx.grad(inner, argnums=(0, 1))(h_cd, params)
