"""Checkpoints and the final model: folders that mlx-lm opens, written whole or not at all.

A checkpoint keeps the master weights (float32, exact) and the rest of the state; `final/` holds the model in
the dtype it came in, adapters merged, beside the adapters themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from grpo_fn.trees import named_leaves, nbytes
from runners.durable import new_folder, remove_folder, save_arrays, save_text
from runners.errors import UserError
from runners.manifest import write_manifest
from runners.metrics import to_json
from runners.model_files import copy_companions, read_json
from runners.models import LoadedModel
from runners.state_files import PackedState, load_state, pack_state, save_state

if TYPE_CHECKING:
    from grpo_fn.state import TrainState

__all__ = [
    "LATEST",
    "Snapshot",
    "checkpoint_folders",
    "list_checkpoints",
    "load_state",
    "prune_checkpoints",
    "save_checkpoint",
    "save_final",
    "save_model",
    "take_snapshot",
    "write_checkpoint",
]

LATEST = "latest"  # a file with the name of the newest checkpoint
TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_MLX = {"format": "mlx"}  # mlx-lm and transformers read it


@attrs.frozen(eq=False)
class Snapshot:
    """A checkpoint in memory: all of it is computed, so that another thread can write it."""

    step: int
    weights: dict[str, mx.array]  # the trained ones, and with full tuning the frozen ones too
    state: PackedState
    trainer_state: Mapping[str, Any]
    loaded: LoadedModel

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return nbytes(self.weights, self.state.arrays)


def take_snapshot(
    step: int,
    state: TrainState,
    loaded: LoadedModel,
    trainer_state: Mapping[str, Any],
    loop: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A checkpoint to be written; arrays are shared with the state, not copied.

    Args:
        step: the batch step, as in the folder's name.
        state: everything that training goes on from.
        loaded: the model the state belongs to.
        trainer_state: JSON values of the loop; "em" and "reward" rank the folder for `prune_checkpoints`.
        loop: trees of arrays that belong to the state.
    """
    weights = _trained(state.params, loaded)
    packed = pack_state(state, weights, loop or {})
    weights = {name: mx.contiguous(array) for name, array in weights.items()}
    mx.eval(weights)
    return Snapshot(step, weights, packed, {"step": step, **trainer_state}, loaded)


def write_checkpoint(run_dir: Path, snapshot: Snapshot) -> Path:
    """Writes `run_dir/checkpoint-{step}`, points `run_dir/latest` to it and returns it.

    A folder of that name is replaced. Raises UserError where the disk refuses: what was there is still there.
    """
    target = run_dir / f"checkpoint-{snapshot.step}"
    with new_folder(target) as folder:
        _write_weights(folder, snapshot.weights, snapshot.loaded)
        save_state(folder, snapshot.state)
        line, _ = to_json(snapshot.trainer_state)
        (folder / TRAINER_STATE).write_text(line + "\n", encoding="utf-8")
        write_manifest(folder)
        if target.exists():  # for a moment there will be no folder of that name
            (run_dir / LATEST).unlink(missing_ok=True)
    try:
        save_text(run_dir / LATEST, target.name + "\n")
    except OSError as error:
        raise UserError(f"{run_dir / LATEST}: cannot be written: {error.strerror or error}") from error
    return target


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: TrainState,
    loaded: LoadedModel,
    trainer_state: Mapping[str, Any],
    loop: Mapping[str, Any] | None = None,
) -> Path:
    """`take_snapshot` and `write_checkpoint` in one."""
    return write_checkpoint(run_dir, take_snapshot(step, state, loaded, trainer_state, loop))


def save_final(run_dir: Path, state: TrainState, loaded: LoadedModel) -> Path:
    """Writes `run_dir/final`, a model that `mlx_lm.load` opens, and returns it."""
    return save_model(run_dir / "final", state.params, loaded)


def save_model(folder: Path, params: Any, loaded: LoadedModel) -> Path:
    """Writes a model folder with these trained parameters, its floating weights in the source model's dtypes.

    With adapters the weights have them merged, and `adapters.safetensors` and `adapter_config.json` lie
    beside them for `mlx_lm.load(base, adapter_path=folder)`. On a quantized base the merged layers are stored
    unquantized, since rounding them to few bits again would undo much of a small update.
    """
    with new_folder(folder) as temporary:
        config = read_json(loaded.path / "config.json")
        if loaded.adapter is None:
            weights = named_leaves(params) | loaded.frozen
            config.pop("quantization_config", None)  # unpacked while it was loaded
        else:
            _write_weights(temporary, _trained(params, loaded), loaded)
            weights, merged = merge_adapters(params, loaded)
            if loaded.quantized:
                config.pop("quantization_config", None)
                config["quantization"] = {**loaded.config["quantization"], **dict.fromkeys(merged, False)}
        weights = {name: _own(name, array, loaded) for name, array in weights.items()}
        save_arrays(temporary / "model.safetensors", weights, _MLX)
        _write_companions(temporary, config, loaded)
    return folder


def merge_adapters(params: Any, loaded: LoadedModel) -> tuple[dict[str, mx.array], list[str]]:
    """The flat weights with the adapters folded into them, and the names of the layers that changed."""
    with _bound(loaded, params) as module:
        layers = {name: part for name, part in module.named_modules() if "lora_a" in part}
        weights = {
            name: array
            for name, array in named_leaves(module.parameters()).items()
            if not any(name.startswith(f"{layer}.") for layer in layers)
        }
        for name, layer in layers.items():
            fused: nn.Module = layer.fuse(dequantize=True)  # pyright: ignore[reportCallIssue]
            weights |= {f"{name}.{leaf}": array for leaf, array in named_leaves(fused.parameters()).items()}
        mx.eval(weights)
    return weights, list(layers)


def checkpoint_folders(run_dir: Path) -> dict[int, Path]:
    """All that is named as a checkpoint, by step, oldest first."""
    if not run_dir.is_dir():
        return {}
    found = {int(m[1]): path for path in run_dir.iterdir() if (m := _CHECKPOINT.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found)}


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The run's whole checkpoints, oldest step first."""
    return [path for path in checkpoint_folders(run_dir).values() if (path / TRAINER_STATE).is_file()]


def prune_checkpoints(run_dir: Path, *, keep_last: int = 0, keep_best: int = 0) -> list[Path]:
    """Deletes checkpoints beyond the last `keep_last` and the best `keep_best`; returns what was deleted.

    The newest always stays; with both 0 everything does. Best is the highest "em" in trainer_state.json, then
    the highest "reward", then the newest; a missing or null number ranks lowest.
    """
    folders = list_checkpoints(run_dir)
    if keep_last <= 0 and keep_best <= 0:
        return []
    ranked = sorted(folders, key=lambda folder: (_score(folder), folders.index(folder)), reverse=True)
    keep = {*folders[-max(keep_last, 1) :], *ranked[:keep_best]}
    doomed = [folder for folder in folders if folder not in keep]
    for folder in doomed:
        remove_folder(folder)
    return doomed


def _score(folder: Path) -> tuple[float, float]:
    try:
        state = read_json(folder / TRAINER_STATE)
    except UserError:  # a damaged one is the first to go
        return (-math.inf, -math.inf)
    em, reward = (
        number if isinstance(number := state.get(name), int | float) else -math.inf
        for name in ("em", "reward")
    )
    return em, reward


def _trained(params: Any, loaded: LoadedModel) -> dict[str, mx.array]:
    """What a weights file of the trained parameters holds: adapters alone, or the whole model."""
    return named_leaves(params) if loaded.adapter is not None else named_leaves(params) | loaded.frozen


def _write_weights(folder: Path, weights: dict[str, mx.array], loaded: LoadedModel) -> None:
    """Weights as `_trained` gives them, with what mlx-lm needs to load them."""
    if loaded.adapter is None:
        save_arrays(folder / "model.safetensors", weights, _MLX)
    else:
        save_arrays(folder / "adapters.safetensors", weights, _MLX)
        adapter_config = {"fine_tune_type": loaded.tune, "model": _base(loaded), **loaded.adapter}
        _write_json(folder / "adapter_config.json", adapter_config)
    config = read_json(loaded.path / "config.json")
    if loaded.adapter is None:
        config.pop("quantization_config", None)
    _write_companions(folder, config, loaded)


def _base(loaded: LoadedModel) -> str:
    return str(loaded.path) if Path(loaded.source).exists() else loaded.source


def _write_companions(folder: Path, config: dict, loaded: LoadedModel) -> None:
    _write_json(folder / "config.json", config)
    copy_companions(loaded.path, folder)


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _own(name: str, array: mx.array, loaded: LoadedModel) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    dtype = loaded.own_dtypes.get(name, loaded.own_dtype)
    return array.astype(dtype if mx.issubdtype(dtype, mx.floating) else loaded.own_dtype)


@contextmanager
def _bound(loaded: LoadedModel, params: Any) -> Iterator[nn.Module]:
    """The module with its frozen leaves and these parameters in it; whatever was in it comes back."""
    saved = loaded.module.parameters()
    try:
        loaded.module.update(tree_unflatten(list(loaded.frozen.items())))
        loaded.module.update(params)
        yield loaded.module
    finally:
        loaded.module.update(saved)
