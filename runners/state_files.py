"""A TrainState as flat named arrays and back, bit for bit.

safetensors knows names, not trees: the shape of the trees (dict order, list or tuple, empty parts, None)
travels as JSON in the file's metadata. An array that roles share is written once and comes back shared; one
of nothing but zeros, as between updates the accumulated gradients are, is not written at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from runners.durable import load_arrays, save_arrays
from runners.errors import UserError

if TYPE_CHECKING:
    from grpo_fn.state import TrainState

FORMAT = "grpo_fn.state"
VERSION = "1"
STATE_FILE = "optimizer.safetensors"
_SCALARS = (bool, int, float, str, type(None))


def pack(tree: Any, name: str, arrays: dict[str, mx.array], known: dict[int, str]) -> Any:
    """Adds the tree's arrays to `arrays` under names that start with `name`; returns its shape as JSON.

    Args:
        tree: dicts with string keys, lists, tuples, arrays, and plain scalars.
        name: where the tree hangs, such as "opt_state".
        arrays: flat name -> array; grows.
        known: id -> name of the arrays seen so far; grows. A known array is referred to, not added again.

    Raises TypeError for anything else, ValueError where two leaves get one name.
    """
    if isinstance(tree, mx.array):
        if id(tree) not in known:
            if name in arrays:
                raise ValueError(
                    f"two arrays are named {name}: a key with a dot in it collides with a nested one"
                )
            if _all_zero(tree):
                return {"zeros": [list(tree.shape), str(tree.dtype).removeprefix("mlx.core.")]}
            arrays[name] = tree
            known[id(tree)] = name
        return {"array": known[id(tree)]}
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str):
                raise TypeError(f"{name}: the key {key!r} is not a string")
        return {"dict": {key: pack(value, f"{name}.{key}", arrays, known) for key, value in tree.items()}}
    if type(tree) in (list, tuple):
        kind = "list" if type(tree) is list else "tuple"
        return {kind: [pack(value, f"{name}.{i}", arrays, known) for i, value in enumerate(tree)]}
    if isinstance(tree, _SCALARS):
        return {"value": tree}
    raise TypeError(
        f"{name}: cannot write a {type(tree).__name__}; wanted dict, list, tuple, array or a scalar"
    )


def unpack(shape: Any, arrays: dict[str, mx.array]) -> Any:
    """The tree that `pack` described; KeyError where an array is missing."""
    (kind, content), *_ = shape.items()
    if kind == "array":
        return arrays[content]
    if kind == "zeros":
        return mx.broadcast_to(mx.array(0, getattr(mx, content[1])), content[0])  # takes no memory
    if kind == "dict":
        return {key: unpack(value, arrays) for key, value in content.items()}
    if kind in ("list", "tuple"):
        values = [unpack(value, arrays) for value in content]
        return values if kind == "list" else tuple(values)
    return content


def _all_zero(array: mx.array) -> bool:
    # Of the bits, not the values: -0.0 is to come back as it was.
    return array.ndim > 0 and not mx.any(array.view(mx.uint8)).item()


def save_state(folder: Path, state: TrainState, weights: dict[str, mx.array]) -> None:
    """Writes `optimizer.safetensors`: all of the state that is not in the folder's weights file already.

    `weights` are the arrays of that file by name; what of them belongs to the state is only referred to.
    """
    arrays: dict[str, mx.array] = {}
    known = {id(array): f"weights:{name}" for name, array in weights.items()}
    names = [field.name for field in attrs.fields(type(state))]
    shapes = {name: pack(getattr(state, name), name, arrays, known) for name in names}
    metadata = {"format": FORMAT, "version": VERSION, "structure": json.dumps(shapes)}
    save_arrays(folder / STATE_FILE, arrays, metadata)


def load_state(folder: Path | str) -> TrainState:
    """The TrainState of a checkpoint folder, bit for bit as it was saved, shared arrays shared.

    Raises UserError: a file is missing, cut off, of another format or version, or lacks an array.
    """
    from grpo_fn.state import TrainState

    folder = Path(folder)
    arrays, metadata = load_arrays(folder / STATE_FILE)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        found = f"{metadata.get('format', 'no format')} version {metadata.get('version', '?')}"
        raise UserError(f"{folder / STATE_FILE}: found {found}, wanted {FORMAT} version {VERSION}")
    for file in ("model.safetensors", "adapters.safetensors"):
        if (folder / file).is_file():
            arrays |= {f"weights:{name}": array for name, array in load_arrays(folder / file)[0].items()}
    shapes = json.loads(metadata["structure"])
    try:
        return TrainState(**{name: unpack(shape, arrays) for name, shape in shapes.items()})
    except KeyError as error:
        raise UserError(f"{folder}: the array {error} of the training state is missing") from error
