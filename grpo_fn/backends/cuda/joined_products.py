"""Products of one input with several weights as one product, for as long as a model samples on CUDA.

    x Qᵀ, x Kᵀ, x Vᵀ   =   x [Q, K, V]ᵀ

A product with few rows takes the host longer to launch than the device to compute: 10 us against the time in
which the weights are read. Larger weights stay as they are, as they would be in memory twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.backends.cuda.kernels import has_cuda
from grpo_fn.policy.patched_layers import is_linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("c_q", "c_k", "c_v"), ("gate_proj", "up_proj"))
MOST_BYTES = 20e6  # of the weights of one product; the device reads as much in some 5 us

Group = list[tuple[str, Any]]  # sibling layers by their paths


class OneInput(nn.Module):
    """Products of one input: the last input, and what has not been asked for of its results."""

    def __init__(self) -> None:
        super().__init__()
        self._input: mx.array | None = None
        self._results: dict[int, mx.array] = {}

    def products(self, x: mx.array) -> Iterator[mx.array]:
        """All results, in order."""
        raise NotImplementedError

    def take(self, number: int, x: mx.array) -> mx.array:
        """One of the results; all of them are computed when the first is asked for."""
        if self._input is not x or number not in self._results:
            self._input, self._results = x, dict(enumerate(self.products(x)))
        result = self._results.pop(number)
        if not self._results:  # nothing that a trace has seen outlives it
            self._input = None
        return result


class Joined(OneInput):
    """Weights [N,V,D] of N products."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.weight = mx.stack([layer.weight for layer in layers])

    def products(self, x: mx.array) -> Iterator[mx.array]:
        """x Wᵀ [...,V] of each weight."""
        count, out, width = self.weight.shape
        for part in mx.split(x.reshape(1, -1, width) @ self.weight.swapaxes(1, 2), count):
            yield part.reshape(*x.shape[:-1], out)


class Part(nn.Module):
    """A layer's place; the first of them holds the weights."""

    def __init__(self, joined: Joined, number: int) -> None:
        super().__init__()
        if number == 0:
            self.joined = joined
        self._take = partial(joined.take, number)  # no child of this module

    def __call__(self, x: mx.array) -> mx.array:
        return self._take(x)


@contextmanager
def joined_products(module: nn.Module) -> Iterator[None]:
    """The module with sibling layers of one shape joined, until the end of the `with` block; on CUDA."""
    found = joinable(module)
    originals = [(name, layer) for group in found for name, layer in group]
    parts = []
    for group in found:
        joined = Joined([layer for _, layer in group])
        parts += [(name, Part(joined, number)) for number, (name, _) in enumerate(group)]
    mx.eval([part.parameters() for _, part in parts])
    try:
        module.update_modules(tree_unflatten(parts))
        yield
    finally:
        module.update_modules(tree_unflatten(originals))


def joinable(module: nn.Module, compute: mx.Dtype | None = None) -> list[Group]:
    """The sibling layers that `joined_products` joins; `compute`: if the weights were cast to it.

    Plain layers of one shape and without a bias that take the same input.
    """
    found: list[Group] = []
    for name, parent in module.named_modules() if has_cuda() else ():
        for names in SIBLINGS:
            group = [(f"{name}.{child}".lstrip("."), parent[child]) for child in names if child in parent]
            layers = [layer for _, layer in group]
            if len(group) < len(names) or not all(
                is_linear(layer) and "bias" not in layer for layer in layers
            ):
                continue
            first = layers[0].weight
            if any(
                layer.weight.shape != first.shape or layer.weight.dtype != first.dtype for layer in layers
            ):
                continue
            if len(layers) * first.size * (compute or first.dtype).size <= MOST_BYTES:
                found.append(group)
    return found
