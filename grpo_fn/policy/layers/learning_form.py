"""The form of a model for the learner: no layer uses a kernel without a gradient.

If `self.training` is False, as in a loaded model, some of mlx-lm's layers use a fused Metal kernel that has
no gradient. Only these layers are switched; dropout, which also depends on it, does not change.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

import mlx.nn as nn


@contextmanager
def learning_form(module: nn.Module) -> Iterator[nn.Module]:
    """The module with `training` on in the layers of mlx-lm that ask for it, until the end of the block."""
    switched = [part for part in module.modules() if asks_for_training(type(part)) and not part.training]
    try:
        for part in switched:
            part._training = True
        yield module
    finally:
        for part in switched:
            part._training = False


@functools.cache
def asks_for_training(kind: type[nn.Module]) -> bool:
    """Whether a layer of mlx-lm's models folder, or one made of it here, computes by `self.training`."""
    return any(
        "training" in function.__code__.co_names
        for base in kind.__mro__
        if base.__module__.startswith(("mlx_lm.models.", "grpo_fn."))
        for value in vars(base).values()
        for function in (value.fget if isinstance(value, property) else value,)
        if isinstance(function, FunctionType)
    )
