"""The dtypes of a module's floating leaves: chooses the compute dtype and converts to it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.trees import named_leaves
from runners.errors import UserError

if TYPE_CHECKING:
    from runners.machine.startup import Platform


def choose_dtype(wish: str, platform: Platform, module: nn.Module) -> mx.Dtype:
    """The compute dtype: the one named, or with "auto" the platform's, or else the model's own."""
    name = platform.default_dtype if wish == "auto" else wish
    return main_dtype(module) if name is None else getattr(mx, name)


def cast_floating(module: nn.Module, dtype: mx.Dtype) -> None:
    """Converts all floating leaves to one dtype; packed integers stay."""
    cast_leaves(module, named_leaves(module.parameters()), dtype)


def cast_leaves(module: nn.Module, leaves: dict[str, mx.array], dtype: mx.Dtype) -> None:
    """Converts the floating ones of these leaves to one dtype."""
    floating = {name: leaf for name, leaf in leaves.items() if mx.issubdtype(leaf.dtype, mx.floating)}
    module.update(tree_unflatten([(name, leaf.astype(dtype)) for name, leaf in floating.items()]))


def main_dtype(module: nn.Module) -> mx.Dtype:
    """The dtype of most floating weights, counted by entries. Raises UserError where all are integers."""
    sizes: Counter[mx.Dtype] = Counter()
    for leaf in named_leaves(module.parameters()).values():
        if mx.issubdtype(leaf.dtype, mx.floating):
            sizes[leaf.dtype] += leaf.size
    if not sizes:
        raise UserError("the model's weights: expected floating point numbers, found integers alone")
    return sizes.most_common(1)[0][0]
