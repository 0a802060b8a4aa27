"""A model's head, which maps hidden states to logits. Its location in an mlx-lm model is found by
trial.

mlx-lm's models compute logits from the last hidden state in different ways: tied or untied, scaled,
soft-capped. Nothing is reimplemented here: the head is the model itself, in which an object that
returns the given hidden states replaces the backbone.
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.composed import exp
from grpo_fn.layers import calls_replaced, parameters_replaced
from grpo_fn.policy.caches.kv_caches import Caches, needs_caches, plain_caches
from grpo_fn.trees import Tree, from_names, named_leaves

_BACKBONES = ("model", "transformer", "backbone")
_SMALL = 1e-2  # products far below all soft caps in use
_LARGE = 1e3  # products far above them
_BETWEEN = (0.3, 1.0, 3.0)  # shares of a cap: points at which a function is compared with that cap


@attrs.frozen(eq=False)
class Head:
    """The function from hidden states to logits, and the function's trainable parameters.

    `function(params, hidden_nd) -> logits_nv`; frozen arrays are closed over and absent from
    `params`. If the logits are cap · tanh(scale · x / cap) of the product x with a matrix, or scale
    · x without a cap, `weight(params)` returns that matrix [V,D].
    """

    params: Tree
    function: Callable[[Tree, mx.array], mx.array]
    weight: Callable[[Tree], mx.array] | None = None
    scale: float = 1.0
    cap: float | None = None

    def logit_gradient(self, product: mx.array) -> mx.array | float:
        """Returns ∂ logit / ∂ product, computed from the product in float32."""
        if self.cap is None:
            return self.scale
        q = exp(-2 * mx.abs(product * (self.scale / self.cap)))
        return self.scale * 4 * q / mx.square(1 + q)  # scale · (1 − tanh²)


def linear_head(weight_vd: mx.array) -> Head:
    """Returns the trainable head `hidden @ weight.T`."""
    return Head(weight_vd, lambda w, h_nd: h_nd @ w.T, lambda w: w)


@attrs.frozen
class HeadSplit:
    """The location of the head in an architecture.

    Attributes:
        path: attributes from the root to the backbone; None if the head is inside the backbone (the
            backbone is then the whole model, and its logits are the hidden states).
        trainable: names of the trainable leaves that the head uses.
        weight: name of a leaf [V,D] such that the logits are cap · tanh(scale · x / cap) of the
            product x with this leaf, or scale · x without a cap; None if there is no such leaf.
        scale: the number `scale` in the formulas of `weight`.
        cap: the number `cap` in the first formula of `weight`; None without a cap.
        over_caches: whether forward passes use the model's own caches: see `needs_caches`.
    """

    path: tuple[str, ...] | None
    trainable: tuple[str, ...]
    weight: str | None
    scale: float = 1.0
    cap: float | None = None
    over_caches: bool = False

    def backbone(self, module: nn.Module) -> Any:
        """Returns the part of `module` that maps token ids to hidden states."""
        for name in self.path or ():
            module = module[name]
        return module

    def hidden(self, module: nn.Module, tokens_bl: mx.array) -> mx.array:
        """Maps token ids [B,L] to hidden states [B,L,D]."""
        # The second argument, the cache, has no default everywhere.
        return self.backbone(module)(tokens_bl, self.caches(module))

    def caches(self, module: nn.Module) -> Caches | None:
        """Returns the caches for a forward pass over whole rows, or None if the model does not need
        any.
        """
        return plain_caches(module) if self.over_caches else None

    def logits(self, module: nn.Module, hidden_nd: mx.array) -> mx.array:
        """Maps hidden states [N,D] to logits [N,V], using the module with its current leaves."""
        if self.path is None:
            return hidden_nd
        *outer, name = self.path
        owner = functools.reduce(lambda part, step: part[step], outer, module)
        with calls_replaced([(owner, name, lambda *args, **kwargs: hidden_nd[None])]):
            return module(mx.zeros((1, hidden_nd.shape[0]), mx.int32))[0]


def split_head(module: nn.Module, trainable: tuple[str, ...]) -> HeadSplit:
    """Finds the backbone and head of `module` by running it on a single token.

    Args:
        module: an mlx-lm model with its weights.
        trainable: names of the module's trainable leaves; without any, `weight` is not determined,
            because that requires several products with the head's matrix and only the learner uses
            it.
    """
    return attrs.evolve(_split(module, trainable), over_caches=needs_caches(module))


def _split(module: nn.Module, trainable: tuple[str, ...]) -> HeadSplit:
    path = _backbone_path(module)
    if path is None:
        return HeadSplit(None, (), None)
    token = mx.zeros((1, 1), mx.int32)
    whole = HeadSplit(path, (), None)
    hidden = whole.hidden(module, token)
    width, vocabulary = getattr(hidden, "shape", (0,))[-1], module(token).shape[-1]
    if not isinstance(hidden, mx.array) or hidden.ndim != 3 or width == vocabulary:
        return HeadSplit(None, (), None)
    if not trainable:
        return whole

    named = named_leaves(module.parameters())
    leaves = {
        name: leaf for name, leaf in named.items() if not any(map(str.isdigit, name.split(".")))
    }
    probe = mx.random.normal((1, width), dtype=mx.float32, key=mx.random.key(0)).astype(
        hidden.dtype
    )
    floating = [name for name in trainable if name in leaves]
    used = tuple(name for name in floating if _depends_on(whole, module, name, leaves[name], probe))
    for name, leaf in leaves.items():
        if tuple(leaf.shape) == (vocabulary, width) and set(used) <= {name}:
            shape = _function_of_product(whole, module, leaf, probe)
            if shape is not None:
                return HeadSplit(path, used, name, shape[0], shape[1])
    return HeadSplit(path, used, None)


def _backbone_path(module: nn.Module) -> tuple[str, ...] | None:
    path: list[str] = []
    while isinstance(module.get("language_model"), nn.Module):
        path.append("language_model")
        module = module["language_model"]
    names = [name for name in _BACKBONES if isinstance(module.get(name), nn.Module)]
    return (*path, names[0]) if names else None


def _depends_on(
    split: HeadSplit, module: nn.Module, name: str, leaf: mx.array, probe: mx.array
) -> bool:
    """Returns whether the head's output becomes NaN if this leaf is NaN."""
    with parameters_replaced(module, from_names({name: mx.full(leaf.shape, mx.nan, leaf.dtype)})):
        return bool(mx.isnan(split.logits(module, probe)).any())


def _function_of_product(
    split: HeadSplit, module: nn.Module, weight_vd: mx.array, probe: mx.array
) -> tuple[float, float | None] | None:
    """Returns the scale and cap for which the product with this matrix results in the head's
    output, or None if there are none.
    """
    unit = mx.maximum(mx.abs((probe @ weight_vd.T).astype(mx.float32)).mean(), 1e-6)

    def at(size: float) -> tuple[mx.array, mx.array]:
        hidden = (probe * (size / unit)).astype(probe.dtype)
        logits = split.logits(module, hidden).astype(mx.float32)
        return (hidden @ weight_vd.T).astype(mx.float32), logits

    if mx.any(split.logits(module, mx.zeros_like(probe)) != 0):
        return None  # the head has a bias
    product, logits = at(_SMALL)
    scale = float((product * logits).sum() / mx.maximum(mx.square(product).sum(), 1e-30))
    if not scale > 0:
        return None
    product, logits = at(_LARGE)
    highest = float(mx.abs(logits).max())
    cap = highest if highest < 0.5 * scale * float(mx.abs(product).max()) else None
    for size in (1.0, _LARGE) if cap is None else [factor * cap / scale for factor in _BETWEEN]:
        product, logits = at(size)
        wanted = product * scale if cap is None else cap * mx.tanh(product * (scale / cap))
        if not mx.abs(logits - wanted).max() <= 1e-2 * mx.abs(wanted).max():
            return None
    return (1.0 if abs(scale - 1) < 1e-3 else scale), cap
