"""Putting leaves into a module, and taking them out again."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.trees import Tree, map_arrays


@contextmanager
def parameters_replaced(module: nn.Module, *trees: Tree) -> Iterator[nn.Module]:
    """The module with the leaves of these trees in place of its own, until the end of the `with` block.

    If two trees have the same leaf, the later one counts. The module's own leaves are always restored:
    otherwise a traced call would leave dead tracers in it.
    """
    saved = module.parameters()
    try:
        for tree in trees:
            module.update(tree)
        yield module
    finally:
        module.update(saved)


def empty(module: nn.Module, tree: Tree) -> None:
    """Replace the module's leaves of this tree by scalars, so that it holds none of their memory."""
    module.update(map_arrays(lambda _: mx.zeros(()), tree))
