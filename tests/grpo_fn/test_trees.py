"""Trees of dicts, lists, tuples, NamedTuples and attrs values."""

from typing import NamedTuple

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest

from grpo_fn.trees import arrays_of, map_arrays, materialize, nbytes, split_leaves, structure_of
from tests.support.tiny_policies import memory_in_use


class Pair(NamedTuple):
    left: object
    right: object


@attrs.frozen(eq=False)
class Box:
    content: object
    label: str = "box"


def numbered(count):
    """Distinct one-element arrays."""
    return [mx.array([float(i)]) for i in range(count)]


def make_tree(a):
    """A tree of every kind, with arrays in the order a[0] … a[5]."""
    return {
        "d": {"x": a[0]},
        "l": [a[1], (a[2], 3)],
        "p": Pair(a[3], "text"),
        "b": Box(content=[a[4], None]),
        "z": a[5],
    }


def test_map_arrays_keeps_every_type_and_every_other_leaf():
    """Containers keep their types and other leaves stay; every walk has the same order."""
    a = numbered(6)
    out = map_arrays(lambda x: x + 10, make_tree(a))
    assert structure_of(out, []) == structure_of(make_tree(a), [])
    found = [[], [], [*arrays_of(make_tree(a))]]
    map_arrays(found[0].append, make_tree(a))
    structure_of(make_tree(a), found[1])
    assert all([id(x) for x in order] == [id(x) for x in a] for order in found)
    assert [x.item() for x in arrays_of(out)] == [10, 11, 12, 13, 14, 15]


A, B = numbered(2)
PAIRS = [
    ({"x": {"a": A}, "b": B}, {"x": {"a": A, "b": B}}),
    (([A], B), ([A, B],)),
    ([A, B], (A, B)),
    (Pair(A, B), (A, B)),
    (Pair(A, B), {"left": A, "right": B}),
    (Box(A), Box([A])),
    (Box(A, label="x"), Box(A, label="y")),
    ({"x": A, "y": B}, {"y": A, "x": B}),
    ((A, None), (None, A)),
    ((A, 1), (A, 1.0)),
    ((A, 1), (A, True)),
    ([[], [A]], [[A], []]),
    ({"x": A}, {"x": A, "y": {}}),
]


@pytest.mark.parametrize("one, other", PAIRS)
def test_two_structures_are_told_apart(one, other):
    """Trees that differ in shape, type, key or value have different descriptions."""
    assert structure_of(one, []) != structure_of(other, [])
    hash(structure_of(one, []))


def test_materialize_computes_what_attrs_values_hold():
    """`mx.eval` does not see a lazy array inside an attrs value; `materialize` does."""
    size = 1 << 18
    mx.eval(mx.array(1.0) + 1)
    lazy = Box(content={"x": mx.arange(size) + 1})
    before = memory_in_use()
    mx.eval(lazy)  # the pitfall that this function is for
    assert memory_in_use() - before < size
    materialize(lazy)
    assert memory_in_use() - before > 3 * size


def test_nbytes_counts_a_shared_array_once():
    """Three roles that share one set of weights count once."""
    weights = {"w": mx.zeros((10, 10)), "b": mx.zeros(10)}
    other = {"w": mx.zeros((10, 10), mx.bfloat16)}
    assert nbytes(weights, Box(content=weights)) == 440
    assert nbytes(weights, other) == 640


def test_a_module_s_leaves_are_trainable_or_frozen():
    """Each leaf is in one of the two, under its dotted name; the arrays are the module's own."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    module.layers[0].freeze(keys="weight")
    trainable, frozen = split_leaves(module)
    assert {*trainable} == {"layers.0.bias", "layers.1.weight"}
    assert {*frozen} == {"layers.0.weight"}
    assert frozen["layers.0.weight"] is module.layers[0].weight
    module.freeze()
    assert split_leaves(module)[0] == {}
