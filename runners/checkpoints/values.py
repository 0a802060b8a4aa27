"""Converts attrs values to plain trees of arrays and back, checking each field's type and range.

Checkpoints are untrusted: values that do not match their field's type are rejected.
"""

import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin

import attrs
import mlx.core as mx
import numpy as np

from runners.config import rules
from runners.errors import UserError, show, user_errors

_Kind = TypeVar("_Kind")


def encoded(value: Any) -> Any:
    """Encodes a value as dicts, lists, MLX arrays and scalars. Fields that have `unsaved` in their
    metadata are omitted.
    """
    if attrs.has(type(value)):
        fields = [
            field.name for field in attrs.fields(type(value)) if "unsaved" not in field.metadata
        ]
        return {name: encoded(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {name: encoded(part) for name, part in value.items()}
    if isinstance(value, frozenset):
        return [encoded(part) for part in sorted(value)]
    if isinstance(value, list | tuple):
        return [encoded(part) for part in value]
    if isinstance(value, np.ndarray):  # as integers, because MLX has float64 only on the CPU
        array = np.ascontiguousarray(value)
        wide = array.dtype.itemsize == 8
        bits = mx.array(array.view(np.uint32) if wide and array.size else array)
        return {"dtype": str(array.dtype), "shape": list(array.shape), "bits": bits}
    return value


def has_arrays(tree: Any) -> bool:
    """Returns whether an encoded value contains an array."""
    if isinstance(tree, dict):
        return any(has_arrays(part) for part in tree.values())
    return isinstance(tree, mx.array) or (isinstance(tree, list) and any(map(has_arrays, tree)))


def decoded(tree: Any, kind: type[_Kind], where: str, **given: Any) -> _Kind:
    """Decodes the result of `encoded` as an attrs class. `given` contains the fields that are not
    in the tree.

    Raises UserError, starting with `where` and naming the field, for invalid values.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{where}: expected a table, found {show(tree)}")
    values = dict(given)
    for field in attrs.fields(attrs.resolve_types(kind)):
        path = f"{where}: {field.name}"
        if field.name in given or "unsaved" in field.metadata:
            continue
        if field.name not in tree:
            raise UserError(f"{path} is missing")
        values[field.name] = _as(tree[field.name], field.type, path)
    with user_errors(where, rules.Mismatch):
        return kind(**values)


def _as(tree: Any, kind: Any, where: str) -> Any:
    """Decodes `tree`, a part of a larger tree, as a value of type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if tree is None:
            return None
        (one,) = [each for each in arguments if each is not type(None)]  # T | None
        return _as(tree, one, where)
    if kind is Any:  # a tree of arrays; its caller compares it with the model's
        return tree
    if attrs.has(kind):
        return decoded(tree, kind, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(tree, dict):
            raise UserError(f"{where}: expected a table, found {show(tree)}")
        return {name: _as(part, arguments[1], f"{where}.{name}") for name, part in tree.items()}
    if kind is np.ndarray:
        return _numpy(tree, where)
    if kind is mx.array:
        if not isinstance(tree, mx.array):
            raise UserError(f"{where}: expected an array, found {show(tree)}")
        return tree
    if origin in (tuple, list, frozenset) or hasattr(kind, "_fields"):
        return _sequence(tree, kind, where)
    if kind is float and type(tree) is float:
        return tree  # a metric may be NaN
    try:
        return rules.structure(tree, kind)
    except rules.Mismatch as error:
        raise UserError(f"{where}: {error.reason(tree)}") from error


def _sequence(tree: Any, kind: Any, where: str) -> Any:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if not isinstance(tree, list | tuple):
        raise UserError(f"{where}: expected a list, found {show(tree)}")
    many = len(arguments) == 1 or arguments[-1:] == (...,)
    kinds = [arguments[0]] * len(tree) if many else list(arguments or kind.__annotations__.values())
    if len(kinds) != len(tree):
        raise UserError(f"{where}: expected {len(kinds)} values, found {len(tree)}")
    parts = [_as(part, one, where) for part, one in zip(tree, kinds, strict=True)]
    return origin(*parts) if hasattr(kind, "_fields") else origin(parts)


def _numpy(tree: Any, where: str) -> np.ndarray:
    try:
        bits = np.array(tree["bits"])
        return bits.view(np.dtype(tree["dtype"])).reshape([int(size) for size in tree["shape"]])
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: expected an array, found {show(tree)}") from error
