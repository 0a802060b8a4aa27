"""Writes checkpoints atomically as folders that mlx-lm can open, and restores them bit for bit.

The weights are the master weights (float32, exact). The other parts of a TrainState are stored as
flat named arrays. Because safetensors supports names but no trees, the trees' structure (dict
order, list or tuple, empty parts, None) is saved as JSON in the file's metadata. An array that
several roles share is written once, and is shared again after loading. A broadcast zero, such as
the accumulated gradients between updates, is not written. trainer_state.json contains the plain
values, which are untrusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import mlx.core as mx

from runners.checkpoints.manifest import write_manifest
from runners.checkpoints.run_folder import TRAINER_STATE, list_checkpoints
from runners.checkpoints.values import decoded
from runners.config import rules
from runners.config.sections import RolloutConfig
from runners.errors import UserError, first_line, show
from runners.files.durable import link_folder, new_folder, remove_folder
from runners.files.json_files import finite_number, read_json, to_json
from runners.files.run_files import BEST
from runners.files.tensor_files import load_arrays, save_arrays
from runners.models.loaded_model import LoadedModel
from runners.models.model_reader import check_finite
from runners.models.model_writer import trained, write_trained
from runners.tokenization.prompt_settings import PromptSettings, write_prompt

if TYPE_CHECKING:
    from grpo_fn.learner import TrainState

STATE_FILE = "optimizer.safetensors"
WEIGHT_FILES = ("model.safetensors", "adapters.safetensors")
_MAY_BE_NAN = ("accum_grads", "loop.")
VERSION = 7  # earlier versions did not save every field of the run's state

_SCALARS = (bool, int, float, str, type(None))
_KINDS = [kind for kind in vars(mx).values() if isinstance(kind, mx.Dtype)]
DTYPES = {str(kind).removeprefix("mlx.core."): kind for kind in _KINDS}


def write_checkpoint(
    run_dir: Path,
    step: int,
    state: TrainState,
    loaded: LoadedModel,
    trainer_state: Mapping[str, Any],
    loop: Mapping[str, Any] | None = None,
    *,
    prompt: PromptSettings | None = None,
) -> Path:
    """Writes `run_dir/checkpoint-{step}` and returns its path. An existing folder of that name is
    replaced.

    The checkpoint also contains the run's best weights so far, as links.

    Args:
        run_dir: the run's folder.
        step: the batch step.
        state: the training state.
        loaded: the model that the state belongs to.
        trainer_state: JSON values of the loop; `prune_checkpoints` ranks folders by "em" and
            "reward".
        loop: trees of arrays that belong to the state.
        prompt: the prompt format, which is written to a separate file.

    Raises UserError if writing fails; in that case, the existing files are unchanged.
    """
    weights = trained(state.params, loaded)
    arrays, metadata = pack_state(state, weights, loop or {})
    with new_folder(run_dir / f"checkpoint-{step}") as folder:
        write_trained(folder, weights, loaded)
        save_arrays(folder / STATE_FILE, arrays, metadata)
        if prompt is not None:
            write_prompt(folder, prompt)
        facts = {"version": VERSION, "step": step, **trainer_state}
        (folder / TRAINER_STATE).write_text(to_json(facts) + "\n", encoding="utf-8")
        if (run_dir / BEST).is_dir():
            link_folder(run_dir / BEST, folder / BEST)
        write_manifest(folder)
    return run_dir / f"checkpoint-{step}"


def pack_state(
    state: TrainState, weights: Mapping[str, mx.array], loop: Mapping[str, Any]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Returns the arrays and the metadata for the state's file. Arrays that are also in the
    `weights` file are stored as references.
    """
    arrays: dict[str, mx.array] = {}
    known = {id(array): f"weights:{name}" for name, array in weights.items()}
    trees = attrs.asdict(state, recurse=False)
    shapes = {
        "state": {name: pack(tree, name, arrays, known) for name, tree in trees.items()},
        "loop": {name: pack(tree, f"loop.{name}", arrays, known) for name, tree in loop.items()},
    }
    return arrays, {"structure": json.dumps(shapes)}


def load_trees(folder: Path) -> tuple[TrainState, dict[str, Any]]:
    """Reads a checkpoint folder's TrainState and the trees that were saved with it, bit for bit.

    Shared arrays are shared again. Raises UserError if a file is missing, truncated or incomplete,
    or if a weight or moment is not finite.
    """
    from grpo_fn.learner import TrainState

    arrays, metadata = load_arrays(folder / STATE_FILE)
    for file in filter(Path.is_file, (folder / name for name in WEIGHT_FILES)):
        arrays |= {f"weights:{name}": array for name, array in load_arrays(file)[0].items()}
    # Accumulated gradients may contain NaN until their update is skipped.
    check_finite({n: a for n, a in arrays.items() if not n.startswith(_MAY_BE_NAN)}, folder)
    try:
        shapes = json.loads(metadata["structure"])
        state = TrainState(**unpack({"dict": shapes["state"]}, arrays))
        return state, unpack({"dict": shapes["loop"]}, arrays)
    except (
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UserError(
            f"{folder / STATE_FILE}: its structure is damaged ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


def pack(tree: Any, name: str, arrays: dict[str, mx.array], known: dict[int, str]) -> Any:
    """Adds the tree's arrays to `arrays` under names that start with `name`. Returns the tree's
    structure as JSON.

    Args:
        tree: dicts with string keys, lists, tuples, arrays, and plain scalars.
        name: the prefix of the tree, such as "opt_state".
        arrays: flat name -> array, extended in place.
        known: id -> name of the arrays seen so far, extended in place. A known array is stored as a
            reference.

    Raises TypeError for other values, and ValueError if two leaves have the same name.
    """
    if isinstance(tree, mx.array):
        if id(tree) not in known and _is_spread_zero(tree):
            return {"zeros": [list(tree.shape), str(tree.dtype).removeprefix("mlx.core.")]}
        if id(tree) not in known:
            if name in arrays:  # a key that contains a dot collides with a nested key
                raise ValueError(f"two arrays are named {name}")
            arrays[name], known[id(tree)] = tree, name
        return {"array": known[id(tree)]}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {
            "dict": {
                key: pack(value, f"{name}.{key}", arrays, known) for key, value in tree.items()
            }
        }
    if type(tree) in (list, tuple):
        kind = type(tree).__name__
        return {kind: [pack(value, f"{name}.{i}", arrays, known) for i, value in enumerate(tree)]}
    if isinstance(tree, _SCALARS):
        return {"value": tree}
    raise TypeError(
        f"{name}: expected a dict, list, tuple, array or scalar, found a {type(tree).__name__}"
    )


def unpack(shape: Any, arrays: dict[str, mx.array]) -> Any:
    """Rebuilds a tree from the structure that `pack` returned. Raises KeyError if an array is
    missing, and other errors for a damaged structure.
    """
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
    """Returns whether the array is a broadcast zero. Arrays whose strides are not all 0 are
    rejected without reading their contents.
    """
    if array.ndim == 0 or array.size == 0 or any(memoryview(cast(Any, array)).strides or ()):
        return False
    # Compares bits, not values, so that -0.0 is restored exactly.
    return not array[(slice(0, 1),) * array.ndim].view(mx.uint8).any().item()


@attrs.frozen(kw_only=True)
class Decided:
    """Values of [rollout] that the config leaves to the machine, as determined by the run's first
    process.
    """

    launch: str = attrs.field(
        validator=lambda _, __, value: rules.check(
            value, attrs.fields_dict(RolloutConfig)["launch"]
        )
    )
    max_batch: int = rules.key(attrs.NOTHING, "rows at a time", ">= 0")


@attrs.frozen(kw_only=True)
class TrainerState:
    """The contents of trainer_state.json: the run's state (`loop`), and the values that a resumed
    run compares.
    """

    step: int = rules.key(attrs.NOTHING, "batch steps", ">= 0")
    em: float | None  # of the last evaluation; ranks checkpoints, with the next two
    eval_reward: float | None  # of the last evaluation
    reward: float | None
    config: dict
    decided: Decided
    data: str  # digest of the training data
    inputs: dict  # see `run_inputs`
    arithmetic: dict  # see `Platform.arithmetic`
    logs: dict[str, int] = rules.key(attrs.NOTHING, "bytes", "each: 0 <= x <= 1e18")  # noqa: RUF009
    loop: dict  # the plain fields of `RunState`


def read_trainer_state(folder: Path) -> TrainerState:
    """Reads a checkpoint's trainer_state.json. Raises UserError for content that no run could have
    saved.
    """
    file = folder / TRAINER_STATE
    content = read_json(file)
    if content.get("version") != VERSION:
        raise UserError(
            f"{file}: expected version {VERSION}, found {show(content.get('version'))}: it was "
            f"saved by a different version of grpo_fn; finish the run with that version, or "
            f"start over with --overwrite"
        )
    return decoded(content, TrainerState, str(file))


def prune_checkpoints(run_dir: Path, *, keep_last: int = 0, keep_best: int = 0) -> None:
    """Deletes all checkpoints except the last `keep_last` and the best `keep_best`. Deletes none if
    `keep_last` is 0.

    The best checkpoint has the highest "em" in trainer_state.json, then the highest "eval_reward",
    then "reward", then the newest step; a missing or null number ranks lowest.
    """
    folders = list_checkpoints(run_dir)
    if keep_last <= 0:
        return
    ranked = sorted(reversed(folders), key=_score, reverse=True)
    for folder in {*folders} - {*folders[-keep_last:], *ranked[:keep_best]}:
        remove_folder(folder)


def _score(folder: Path) -> list[float]:
    state = {}
    with suppress(UserError):  # damaged checkpoints are deleted first
        state = read_json(folder / TRAINER_STATE)
    numbers = [finite_number(state.get(name)) for name in ("em", "eval_reward", "reward")]
    return [-math.inf if number is None else number for number in numbers]
