"""Gradient checkpointing of a model's blocks: less memory in the learner for about 1.4 × its time."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.layers import parameters_replaced
from grpo_fn.policy.layers.learning_form import learning_form
from grpo_fn.trees import map_arrays


def checkpoint_layers(module: nn.Module) -> int:
    """Make each block of this one model recompute its inside in the backward pass; returns how many.

    Only these instances change, not their class: other models of the same kind in the process stay as they
    are. Decoding, which passes a cache, is left alone.

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


def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    class Checkpointed(kind):  # type: ignore[misc, valid-type]
        recomputes = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if any(_is_cache(value) for value in (*args, *kwargs.values())):
                return super().__call__(*args, **kwargs)
            call = super().__call__

            # mx.checkpoint silently gives no gradient to arrays that it closes over, so they are arguments.
            # It takes a gradient of every argument, which packed weights do not have, hence stop_gradient.
            def inner(params: Any, trainable: Any, args: Any, kwargs: Any) -> Any:
                # The backward pass runs this again, after the policy's `learning` has ended.
                with (
                    parameters_replaced(self, map_arrays(mx.stop_gradient, params), trainable),
                    learning_form(self),
                ):
                    return call(*args, **kwargs)

            return mx.checkpoint(inner)(self.parameters(), self.trainable_parameters(), args, kwargs)

    Checkpointed.__name__ = kind.__name__
    Checkpointed.__qualname__ = kind.__qualname__
    return Checkpointed


def _is_cache(value: Any) -> bool:
    """Whether the value is a cache that keeps a layer's keys and values."""
    caches = hasattr(value, "update_and_fetch") or hasattr(value, "make_mask")
    return caches and not hasattr(value, "keeps_nothing")
