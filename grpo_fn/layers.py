"""Identifies kinds of layers, and replaces a model's layers, leaves or functions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.trees import Tree, from_names, map_arrays, named_leaves

# Exceptions that a model raises if it cannot be called in the tried way. RuntimeError is not among
# them: MLX raises RuntimeError when memory runs out, which says nothing about the model.
CANNOT_CALL = (AttributeError, IndexError, NotImplementedError, TypeError, ValueError)

NamedLayers = list[tuple[str, Any]]  # layers with their paths in the model

_PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def computes_as(layer: Any) -> type:
    """Returns the layer's class, or the mlx class whose product the layer computes.

    A subclass may compute a different function. A subclass that computes the same product sets
    `computes_as` in its body; further subclasses do not inherit the setting.
    """
    kind = type(layer)
    return vars(kind).get("computes_as", kind)


def is_linear(layer: Any) -> bool:
    """Returns whether the layer computes a plain product with `weight`, and adds `bias` if it has
    one.
    """
    return computes_as(layer) is nn.Linear


def is_packed(layer: Any) -> bool:
    """Returns whether the layer computes a product with quantized weights, or is a quantized
    embedding.
    """
    return computes_as(layer) in _PACKED


@contextmanager
def replaced_layers(module: nn.Module, new: NamedLayers, old: NamedLayers) -> Iterator[nn.Module]:
    """Inside the `with` block, the module has the new layers at these paths; afterwards, the old
    layers are restored.
    """
    try:
        module.update_modules(tree_unflatten(new))
        yield module
    finally:
        module.update_modules(tree_unflatten(old))


@contextmanager
def parameters_replaced(module: nn.Module, *trees: Tree) -> Iterator[nn.Module]:
    """Inside the `with` block, the leaves in these trees replace the module's own leaves.

    If two trees have the same leaf, the later one is used. The module's own leaves are always
    restored; otherwise a traced call would leave dead tracers in it.
    """
    saved = module.parameters()
    try:
        for tree in trees:
            module.update(tree)
        yield module
    finally:
        module.update(saved)


class CallReplaced:
    """Replaces a part of a module: calls are forwarded to a function, and attribute access to the
    part.
    """

    def __init__(self, part: Any, function: Callable[..., Any]) -> None:
        self._part, self._function = part, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


@contextmanager
def calls_replaced(parts: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Inside the `with` block, calling an owner's part with one of these names calls the function
    instead.
    """
    saved = [(owner, name, owner[name], function) for owner, name, function in parts]
    try:
        for owner, name, part, function in saved:
            owner[name] = CallReplaced(part, function)
        yield
    finally:
        for owner, name, part, _ in saved:
            owner[name] = part


@contextmanager
def calls_noted(layers: Mapping[Any, Any], note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Inside the `with` block, the layers call `note(key, x)` with their inputs."""
    kinds = {key: type(layer) for key, layer in layers.items()}

    def noting(key: Any, kind: Any) -> Any:
        def call(self: Any, x: Any, *rest: Any, **options: Any) -> Any:
            note(key, x)
            return kind.__call__(self, x, *rest, **options)

        return type(kind.__name__, (kind,), {"__call__": call})

    try:
        for key, kind in kinds.items():
            layers[key].__class__ = noting(key, kind)
        yield
    finally:
        for key, kind in kinds.items():
            layers[key].__class__ = kind


def twin_module(module: nn.Module) -> nn.Module:
    """Returns a copy of the module that shares all arrays with the module."""
    held = module.parameters()
    blank = from_names({name: mx.zeros(()) for name in named_leaves(held)})
    with parameters_replaced(module, blank):
        twin = deepcopy(module)
    twin.update(held)
    return twin


def empty(module: nn.Module, tree: Tree) -> None:
    """Replaces the module's leaves that are in this tree by scalars, so that the module does not
    keep their memory.
    """
    module.update(map_arrays(lambda _: mx.zeros(()), tree))


def with_globals(function: FunctionType, **names: Any) -> FunctionType:
    """Returns a copy of a function in which these globals are replaced."""
    copy = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
