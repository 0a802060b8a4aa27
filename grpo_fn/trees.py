"""Trees: nested dicts, lists, tuples, NamedTuples and attrs values whose leaves are arrays.

mlx's own tree functions do not descend into attrs objects, and `mx.eval` silently ignores these
objects.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from grpo_fn.process_check import check_process

Tree = Any
T = TypeVar("T")


def map_arrays(function: Callable[[Any], Any], tree: Tree, *, kind: type = mx.array) -> Tree:
    """Returns the tree after `function` is applied to every leaf of type `kind`; other leaves do
    not change.
    """
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_arrays(function, value, kind=kind) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [map_arrays(function, value, kind=kind) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if attrs.has(type(tree)):
        changed = {
            name: map_arrays(function, getattr(tree, name), kind=kind)
            for name in attrs.fields_dict(type(tree))
        }
        return attrs.evolve(tree, **changed)
    return tree


def arrays_of(tree: Tree) -> Iterator[mx.array]:
    """Yields every array in the tree, in a fixed order."""
    found: list[mx.array] = []
    structure_of(tree, found)
    return iter(found)


def named_leaves(tree: Tree) -> dict[str, mx.array]:
    """Returns a parameter tree's leaves by dotted name, such as
    `model.layers.0.mlp.up_proj.weight`.
    """
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def from_names(leaves: Mapping[str, mx.array]) -> Tree:
    """Inverts `named_leaves`; returns {} if there are no leaves."""
    return tree_unflatten(list(leaves.items())) if leaves else {}


def split_leaves(module: nn.Module) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Returns a module's trainable leaves and its other leaves, each by dotted name."""
    trainable = named_leaves(module.trainable_parameters())
    everything = named_leaves(module.parameters())
    return trainable, {name: leaf for name, leaf in everything.items() if name not in trainable}


def flat(lists: Iterable[Iterable[T]]) -> list[T]:
    """Concatenates the lists."""
    return list(chain.from_iterable(lists))


def group_numbers(sizes: Iterable[int]) -> list[int]:
    """Returns each member's group number: 0, 0, 1, 1, 1 for groups of sizes 2 and 3."""
    return flat([number] * size for number, size in enumerate(sizes))


def on_host(array: mx.array) -> list[Any]:
    """Returns an array's numbers as (nested) lists; waits for the device."""
    return cast(list[Any], array.tolist())


def structure_of(tree: Tree, found: list[mx.array]) -> Any:
    """Returns a hashable description of the tree that is unique to its structure, and appends the
    tree's arrays to `found`.

    Values that are not arrays are part of the structure.
    """
    if isinstance(tree, mx.array):
        found.append(tree)
        return "array"
    if isinstance(tree, dict):
        return ("dict", tuple((key, structure_of(value, found)) for key, value in tree.items()))
    if isinstance(tree, list | tuple):
        return (type(tree), tuple(structure_of(value, found) for value in tree))
    if attrs.has(type(tree)):
        names = attrs.fields_dict(type(tree))
        return (
            type(tree),
            tuple((name, structure_of(getattr(tree, name), found)) for name in names),
        )
    return ("value", type(tree), tree)


def materialize(*trees: Tree) -> None:
    """Evaluates every array in the trees.

    Use `materialize` instead of `mx.eval` for this library's values, because `mx.eval(state)`
    silently does nothing.
    """
    check_process()
    mx.eval(list(arrays_of(trees)))


def materialize_in_parts(*trees: Tree, most: int = 1 << 30) -> None:
    """Like `materialize`, but evaluates at most this many bytes at a time, because Metal's watchdog
    ends long computations.
    """
    part: list[mx.array] = []
    for array in arrays_of(trees):
        if part and sum(each.nbytes for each in part) + array.nbytes > most:
            materialize(part)
            part = []
        part.append(array)
    materialize(part)


def nbytes(*trees: Tree) -> int:
    """Returns the number of bytes in the trees' arrays; an array that several roles share counts
    once.
    """
    return sum({id(array): array.nbytes for array in arrays_of(trees)}.values())
