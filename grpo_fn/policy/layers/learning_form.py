"""Prepares a model for the learner: turns on layers that have a gradient, and makes blocks save
memory.

If `self.training` is False, as in a loaded model, some of mlx-lm's layers use a fused Metal kernel
that has no gradient. Only these layers are switched; dropout, which also depends on `training`, is
unchanged.

Gradient checkpointing saves memory in the learner, but makes it about 1.4 times slower. If only
gated MLPs are checkpointed, most of that memory is saved, for less additional time.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import parameters_replaced
from grpo_fn.trees import flat, map_arrays

_GATED = {"gate_proj", "up_proj", "down_proj"}  # the parts of a gated MLP


@contextmanager
def learning_form(module: nn.Module) -> Iterator[nn.Module]:
    """Inside the `with` block, `training` is turned on in those mlx-lm layers that depend on it."""
    switched = [
        part for part in module.modules() if asks_for_training(type(part)) and not part.training
    ]
    try:
        for part in switched:
            part._training = True
        yield module
    finally:
        for part in switched:
            part._training = False


@functools.cache
def asks_for_training(kind: type[nn.Module]) -> bool:
    """Returns whether a layer (from mlx-lm's models folder, or derived from such a layer here)
    depends on `self.training`.
    """
    values = flat(
        vars(base).values()
        for base in kind.__mro__
        if base.__module__.startswith(("mlx_lm.models.", "grpo_fn."))
    )
    called = [value.fget if isinstance(value, property) else value for value in values]
    functions = [each for each in called if isinstance(each, FunctionType)]
    return any("training" in function.__code__.co_names for function in functions)


def checkpoint_layers(module: nn.Module) -> int:
    """Makes each block of this model recompute its intermediate results in the backward pass;
    returns the number of blocks.

    Only these instances change, not their class, so other models in the process are not affected.
    Decoding, which passes a cache, is not affected.

    Raises:
        ValueError: the model has no `layers`.
    """
    layers = getattr(module, "layers", None)
    if not layers:
        raise ValueError(f"{type(module).__name__} has no layers to checkpoint")
    for layer in layers:
        if not hasattr(type(layer), "recomputes"):  # once is enough
            layer.__class__ = _checkpointed(type(layer))
    return len(layers)


def checkpoint_mlps(module: nn.Module) -> int:
    """Makes gated MLPs recompute like `checkpoint_layers`, but only while learning; returns the
    number of MLPs.
    """
    gated = gated_mlps(module)
    for part in gated:
        if not hasattr(type(part), "recomputes"):
            part.__class__ = _checkpointed(type(part))
    return len(gated)


def gated_mlps(module: nn.Module) -> list[nn.Module]:
    """Returns the MLPs that consist of a gate and two projections, except those of experts."""
    return [part for part in module.modules() if set(part.children()) == _GATED]


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    class Checkpointed(kind):  # type: ignore[misc, valid-type]
        recomputes = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            decodes = any(_is_cache(value) for value in (*args, *kwargs.values()))
            if decodes or not self.training:
                return super().__call__(*args, **kwargs)
            call = super().__call__

            # mx.checkpoint silently gives no gradient to arrays that it closes over, so they are
            # arguments. mx.checkpoint differentiates every argument, which packed weights do not
            # allow, hence stop_gradient.
            def inner(params: Any, trainable: Any, args: Any, kwargs: Any) -> Any:
                # The backward pass runs this again, after the policy's `learning` has ended.
                with (
                    parameters_replaced(self, map_arrays(mx.stop_gradient, params), trainable),
                    learning_form(self),
                ):
                    return call(*args, **kwargs)

            return mx.checkpoint(inner)(
                self.parameters(), self.trainable_parameters(), args, kwargs
            )

    Checkpointed.__name__ = kind.__name__
    Checkpointed.__qualname__ = kind.__qualname__
    return Checkpointed


def _is_cache(value: Any) -> bool:
    """Returns whether the value is a cache that keeps a layer's keys and values."""
    caches = hasattr(value, "update_and_fetch") or hasattr(value, "make_mask")
    return caches and not hasattr(value, "keeps_nothing")
