"""A TrainState and the trees that belong to it as flat named arrays and back, bit for bit.

safetensors has names but no trees: the structure of the trees (dict order, list or tuple, empty parts, None)
is saved as JSON in the file's metadata. An array that roles share is written once and is shared again after
loading. A broadcast zero, such as the accumulated gradients between updates, is not written at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import mlx.core as mx

from runners.errors import UserError, first_line
from runners.files.tensor_files import load_arrays
from runners.models.model_reader import check_finite

if TYPE_CHECKING:
    from grpo_fn.learner import TrainState

STATE_FILE = "optimizer.safetensors"
WEIGHT_FILES = ("model.safetensors", "adapters.safetensors")
_MAY_BE_NAN = ("accum_grads", "loop.")

_SCALARS = (bool, int, float, str, type(None))
_KINDS = [kind for kind in vars(mx).values() if isinstance(kind, mx.Dtype)]
DTYPES = {str(kind).removeprefix("mlx.core."): kind for kind in _KINDS}


def pack(tree: Any, name: str, arrays: dict[str, mx.array], known: dict[int, str]) -> Any:
    """Adds the tree's arrays to `arrays` under names that start with `name`; returns its shape as JSON.

    Args:
        tree: dicts with string keys, lists, tuples, arrays, and plain scalars.
        name: the prefix of the tree, such as "opt_state".
        arrays: flat name -> array; grows.
        known: id -> name of the arrays seen so far; grows. A known array is referred to, not added again.

    Raises TypeError for anything else, ValueError if two leaves get the same name.
    """
    if isinstance(tree, mx.array):
        if id(tree) not in known and _is_spread_zero(tree):
            return {"zeros": [list(tree.shape), str(tree.dtype).removeprefix("mlx.core.")]}
        if id(tree) not in known:
            if name in arrays:  # a key with a dot in it collides with a nested one
                raise ValueError(f"two arrays are named {name}")
            arrays[name], known[id(tree)] = tree, name
        return {"array": known[id(tree)]}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: pack(value, f"{name}.{key}", arrays, known) for key, value in tree.items()}}
    if type(tree) in (list, tuple):
        kind = type(tree).__name__
        return {kind: [pack(value, f"{name}.{i}", arrays, known) for i, value in enumerate(tree)]}
    if isinstance(tree, _SCALARS):
        return {"value": tree}
    raise TypeError(f"{name}: expected a dict, list, tuple, array or scalar, found a {type(tree).__name__}")


def unpack(shape: Any, arrays: dict[str, mx.array]) -> Any:
    """The tree that `pack` described. KeyError if an array is missing, and others for a damaged shape."""
    ((kind, content),) = shape.items()
    if kind == "array":
        return arrays[content]
    if kind == "zeros":
        size, dtype = content
        return mx.broadcast_to(mx.array(0, DTYPES[dtype]), size)  # takes no memory
    if kind == "dict":
        return {key: unpack(value, arrays) for key, value in content.items()}
    if kind == "value":
        return content
    return {"list": list, "tuple": tuple}[kind](unpack(value, arrays) for value in content)


def _is_spread_zero(array: mx.array) -> bool:
    """Whether this is a broadcast zero. Strides cost nothing to read; contents would."""
    if array.ndim == 0 or array.size == 0 or any(memoryview(cast(Any, array)).strides or ()):
        return False
    # Compares bits, not values, so that -0.0 is restored exactly.
    first = array[tuple([slice(0, 1)] * array.ndim)]
    return not mx.any(first.view(mx.uint8)).item()


def pack_state(
    state: TrainState, weights: Mapping[str, mx.array], loop: Mapping[str, Any]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of the state's file: the whole state but for the arrays of the weights' file.

    Args:
        state: to be saved.
        weights: the arrays of that file by name; the state's arrays among them are only referred to.
        loop: trees that belong to the state, see `pack`.
    """
    arrays: dict[str, mx.array] = {}
    known = {id(array): f"weights:{name}" for name, array in weights.items()}
    names = [field.name for field in attrs.fields(type(state))]
    shapes = {
        "state": {name: pack(getattr(state, name), name, arrays, known) for name in names},
        "loop": {name: pack(tree, f"loop.{name}", arrays, known) for name, tree in loop.items()},
    }
    return arrays, {"structure": json.dumps(shapes)}


def load_trees(folder: Path) -> tuple[TrainState, dict[str, Any]]:
    """The TrainState of a checkpoint folder and the trees that were saved with it, bit for bit.

    Shared arrays are shared again. Raises UserError if a file is missing, cut off, lacks an array, or has a
    weight or moment that is not finite.
    """
    from grpo_fn.learner import TrainState

    arrays, metadata = load_arrays(folder / STATE_FILE)
    for file in WEIGHT_FILES:
        if (folder / file).is_file():
            arrays |= {f"weights:{name}": array for name, array in load_arrays(folder / file)[0].items()}
    # A sum of gradients may hold NaN until its update is skipped.
    check_finite({n: a for n, a in arrays.items() if a.size and not n.startswith(_MAY_BE_NAN)}, folder)
    try:
        shapes = json.loads(metadata["structure"])
        state = TrainState(**{name: unpack(shape, arrays) for name, shape in shapes["state"].items()})
        return state, {name: unpack(shape, arrays) for name, shape in shapes["loop"].items()}
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"{folder / STATE_FILE}: its structure is damaged ({type(error).__name__}: {first_line(error)})"
        ) from error
