"""Checks the disk space for a run's files: before training, and again before each checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx

from grpo_fn.trees import named_leaves, nbytes
from runners.checkpoints.snapshot import checkpoint_folders
from runners.errors import UserError, gigabytes
from runners.models.folders import companions

if TYPE_CHECKING:
    from grpo_fn.learner import TrainState
    from runners.models.loaded_model import LoadedModel


@attrs.frozen
class DiskRoom:
    """The sizes of a run's files, in bytes."""

    folder: Path
    final: int  # the final model

    def check_start(self, where: str, *, replaces: bool) -> None:
        """Before training: raises UserError if the final model does not fit.

        `where` is the config's key for the folder; `replaces`: an earlier run's files in it will be removed.
        """
        free = _free(self.folder)
        if free is not None and replaces:
            free += _size([*checkpoint_folders(self.folder).values(), self.folder / "final"])
        if free is not None and free < self.final:
            raise UserError(
                f"{where}: {self.folder}: the final model takes {gigabytes(self.final)}, and the disk has "
                f"{gigabytes(free)} free; make room, or choose another run.output_dir"
            )

    def check_checkpoint(self, name: str, size: int, *, last: bool) -> None:
        """Raises UserError if a checkpoint of `size` bytes leaves no room for the final model.

        The `last` checkpoint of a run that ends early may use that room.
        """
        free, reserved = _free(self.folder), 0 if last else self.final
        if free is not None and free < size + reserved:
            final = f" and the final model {gigabytes(reserved)}" if reserved else ""
            raise UserError(
                f"{self.folder}: {name} is not saved: it takes {gigabytes(size)}{final}, and the disk has "
                f"{gigabytes(free)} free"
            )


def disk_room(folder: Path, state: TrainState, loaded: LoadedModel) -> DiskRoom:
    """The sizes of a run's files, accurate to some kilobytes; with adapters on packed weights at most."""
    others = _size(companions(loaded.path))
    weights = named_leaves(state.params) | loaded.frozen
    final = sum(_stored(name, array, loaded) for name, array in weights.items())
    if loaded.adapter is not None:
        final += nbytes(state.params)  # the adapters are saved beside the merged weights
        if loaded.quantized:  # merged layers are stored unpacked
            layers = [name.removesuffix("lora_a") for name in weights if name.endswith("lora_a")]
            final += loaded.source_dtype.size * sum(
                _product(weights[f"{layer}lora_a"], weights[f"{layer}lora_b"]) for layer in layers
            )
    return DiskRoom(folder, final + others)


def _stored(name: str, array: mx.array, loaded: LoadedModel) -> int:
    """Bytes of a weight in the dtype of the model's files, as the final model has it."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array.nbytes
    return array.size * loaded.source_dtypes.get(name, loaded.source_dtype).size


def _product(a: mx.array, b: mx.array) -> int:
    """Entries of an adapter's product: [I, r] · [r, O], or for E experts [E·r, I] and [E, O, r]."""
    return a.shape[0] * b.shape[1] if b.ndim == 2 else b.shape[0] * b.shape[1] * a.shape[1]


def _size(paths: list[Path]) -> int:
    """Bytes of these files, and of all files in these folders."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())


def _free(folder: Path) -> int | None:
    """Bytes that this user may write on the folder's disk; None if the file system does not tell."""
    place = next((path for path in (folder, *folder.parents) if path.exists()), Path())
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
