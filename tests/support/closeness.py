"""How close two computations of the same training must be.

They add the same float32 numbers in another order: on other ranks, in other micro-batches, or with other BLAS
threads or kernels. Each leaf's mean difference is compared with the mean gradient, or with the weights' mean
distance from the start. Maxima would not do: Adam turns the rounding of a gradient near 0 into any step.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from grpo_fn.trees import named_leaves

# A wrong row, mask or denominator makes a per cent or more. Rounding, with OpenBLAS's kernels for AMD and
# Intel: up to 4e-5 of a gradient whose sums nearly cancel, and 1e-6 of the weights' way in a few updates.
OF_GRADIENTS, OF_WEIGHTS = 3e-4, 3e-3


def apart(found: Any, wanted: Any, start: Any = None) -> float:
    """Mean |found − wanted| over mean |wanted − start| of the leaf where this is largest.

    Each is a tree of parameters or a model's folder; `start` is 0 if it is left out.
    """
    found, wanted = _leaves(found), _leaves(wanted)
    origin = dict.fromkeys(wanted, 0.0) if start is None else _leaves(start)
    assert found.keys() == wanted.keys() <= origin.keys()
    assert all(found[name].shape == leaf.shape for name, leaf in wanted.items())
    return max(
        np.abs(found[name] - leaf).mean() / max(np.abs(leaf - origin[name]).mean(), 1e-30)
        for name, leaf in wanted.items()
    )


def _leaves(tree: Any) -> dict[str, np.ndarray]:
    """Float64 arrays by their names."""
    if isinstance(tree, Path):
        leaves: Any = mx.load(str(tree / "model.safetensors"))
    else:
        leaves = named_leaves(tree)
    return {name: np.array(leaf.astype(mx.float32), np.float64) for name, leaf in leaves.items()}


def assert_same_gradients(found: Any, wanted: Any) -> None:
    """Trees of gradients of the same batch."""
    assert apart(found, wanted) < OF_GRADIENTS


def assert_same_weights(found: Any, wanted: Any, start: Any) -> None:
    """What two runs of the same made of the weights `start`, which both left."""
    assert apart(found, wanted, start) < OF_WEIGHTS


def assert_same_figures(found: Any, wanted: Any, names: Iterable[str] | None = None) -> None:
    """Statistics or log lines: each number, or these names'. A loss near 0 is a sum of numbers near 1."""
    one, other = (tree if isinstance(tree, Mapping) else tree._asdict() for tree in (found, wanted))
    for name in other if names is None else names:
        pair = [each.get(name) for each in (one, other)]
        got, want = (each.item() if isinstance(each, mx.array) else each for each in pair)
        assert got == pytest.approx(want, rel=1e-3, abs=1e-5), name
