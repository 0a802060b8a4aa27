"""The wrapper around mx.compile: right for every nesting, with no unnecessary trace."""

import importlib
import io
import re
from typing import Any, NamedTuple

import attrs
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo_fn as g
from grpo_fn import compile as compile_module
from grpo_fn.compile import Compiled
from grpo_fn.trees import arrays_of
from tests.support.properties.strategies import examples
from tests.support.tiny_policies import memory_in_use


class P(NamedTuple):
    x: Any
    y: Any


class Q(NamedTuple):
    y: object
    x: object


@attrs.frozen(eq=False)
class State:
    params: Any
    step: Any
    note: str = ""


def one(value):
    """A float32 array of one element; only the nesting distinguishes arguments."""
    return mx.array([float(value)])


def described(*args):
    """A tree that names the place of every array: {path: sin(array)}."""
    out = {}

    def walk(path, tree):
        if isinstance(tree, mx.array):
            out[path] = mx.sin(tree)
        elif isinstance(tree, dict):
            for key, value in tree.items():
                walk(f"{path}.{key}", value)
        elif isinstance(tree, list | tuple):
            kind = type(tree).__name__
            names = getattr(tree, "_fields", range(len(tree)))
            for name, value in zip(names, tree, strict=True):
                walk(f"{path}.{kind}.{name}", value)
        elif attrs.has(type(tree)):
            for field in attrs.fields(type(tree)):
                walk(f"{path}.{type(tree).__name__}.{field.name}", getattr(tree, field.name))
        else:
            out[f"{path}={tree!r}"] = mx.array(0.0)

    for number, arg in enumerate(args):
        walk(str(number), arg)
    return out


def assert_same(got, want):
    """Two flat dicts of arrays are equal, names and bits."""
    assert got.keys() == want.keys()
    assert all(bool((got[name] == want[name]).all()) for name in want)


@pytest.mark.parametrize(
    "first, second",
    [
        (({"x": {"a": one(1)}, "b": one(2)},), ({"x": {"a": one(1), "b": one(2)}},)),
        (([one(1)], one(2)), ([one(1), one(2)],)),
        ((P(one(1), one(2)),), (Q(one(1), one(2)),)),
        (({"a": one(1), "b": one(2)},), ({"b": one(1), "a": one(2)},)),
        ((State(one(1), one(2)),), (State([one(1), one(2)], None),)),
        ((one(1), None), (None, one(1))),
    ],
)
def test_the_structures_that_mlx_confuses(first, second):
    """Calls that share an entry in mlx's cache get separate programs."""
    f = g.compiled(described)
    for args in (first, second, first, second):
        assert_same(f(*args), described(*args))
    assert f.traces == 2


leaf = st.builds(one, st.integers(-9, 9))
trees = st.recursive(
    leaf | st.sampled_from([None, 0, 1, "a"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(P, inner, inner),
        st.builds(Q, inner, inner),
        st.builds(State, inner, inner, st.sampled_from(["", "n"])),
    ),
    max_leaves=5,
)
shared = g.compiled(described)


@settings(max_examples=examples(75))
@given(args=st.lists(trees, min_size=1, max_size=3))
def test_any_two_trees_are_kept_apart(args):
    """One compiled function gives the plain function's result for every tree of equal leaves."""
    if any(True for _ in arrays_of(args)):
        assert_same(shared(*args), described(*args))


def test_values_go_in_and_come_out():
    """Types, other fields and numbers survive every call; named tuples keep their names."""

    @g.compiled
    def step(state, by):
        moved = attrs.evolve(state, params={"w": state.params["w"] * by.x}, step=state.step + 1)
        return moved, (P(x=by.y, y={"z": by.x}), None, "ok")

    state = State({"w": mx.array([1.0, 2.0])}, mx.array(0), note="kept")
    for turn in range(1, 4):
        state, (by, nothing, text) = step(state, P(mx.array(float(turn)), one(9)))
        assert type(state) is State and state.note == "kept" and nothing is None and text == "ok"
        assert type(by) is P and by.x.item() == 9 and state.step.item() == by.y["z"].item() == turn
    assert state.params["w"].tolist() == [6.0, 12.0]
    assert step.traces == 1


def test_a_trace_a_shape_and_a_dtype():
    """A known shape is never traced again; a new shape, dtype or number is one trace."""
    f = g.compiled(lambda x, n: x * n)
    for turn in range(3):
        f(mx.full((4,), float(turn)), mx.array(2.0))
    assert f.traces == 1
    f(mx.zeros((5,)), mx.array(2.0))
    assert f.traces == 2
    f(mx.zeros((5,), mx.bfloat16), mx.array(2.0))
    assert f.traces == 3
    assert f(mx.ones((5,)), 3.0).tolist() == [3.0] * 5 and f(mx.ones((5,)), 4.0).tolist() == [4.0] * 5
    assert f.traces == 5
    f(mx.zeros((4,)), mx.array(7.0))
    assert f.traces == 5


def test_arguments_are_not_kept_alive():
    """After the call, the wrapper holds none of the arrays passed through it."""
    f = g.compiled(lambda tree: {"sum": tree["x"].sum()})
    mx.eval(f({"x": mx.zeros((1 << 18,))}))
    before = memory_in_use()
    big = mx.ones((1 << 18,)) + 1
    assert f({"x": big})["sum"].item() == 2 * (1 << 18)
    del big
    assert memory_in_use() - before < 1 << 12


def test_of_many_programs_the_oldest_are_dropped(monkeypatch):
    """The least recently used program is dropped with its arrays."""
    # By its name: the package's `compiled` is the function.
    monkeypatch.setattr(importlib.import_module("grpo_fn.compile"), "PROGRAMS", 3)
    f = g.compiled(lambda x: x + 1)
    for size in (1, 2, 3, 1, 4):  # 2 goes
        f(mx.zeros((size,)))
    assert f.traces == 4
    for size in (3, 1, 4):
        f(mx.zeros((size,)))
    assert f.traces == 4
    assert f(mx.zeros((2,))).tolist() == [1, 1]
    assert f.traces == 5


def operations(array):
    """The names of the operations that compute an array."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return {*re.findall(r'label ="(\w+)"', text.getvalue())}


def test_an_unfused_step_is_traced_once_and_has_the_same_numbers():
    """Its graph keeps every operation; later steps are fused, and disable_compile() stays respected."""

    def function(x):
        return mx.exp(x) * mx.sin(x) + 1

    x, names = mx.arange(8) / 7, {"Exp", "Sin", "Multiply", "Add"}
    step = Compiled(function, fuse=False)
    for _ in range(3):
        unfused = step(x)
        assert names <= operations(unfused)
    fused = Compiled(function)(x)
    assert not names & operations(fused)
    assert step.traces == 1
    assert mx.allclose(unfused, fused, rtol=1e-6).item()
    mx.disable_compile()
    try:
        Compiled(function, fuse=False)(x)
        assert not compile_module._compiles()
    finally:
        mx.enable_compile()
    assert compile_module._compiles()
