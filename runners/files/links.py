"""Untrusted folders: nothing in them may lead to a file outside."""

from __future__ import annotations

from pathlib import Path

from runners.errors import UserError, show

_FOLDERS = ("tokenizer", "additional_chat_templates")  # of a model folder, read besides its own files


def check_links(folder: Path, files: list[Path] | None = None) -> None:
    """Raises UserError if a file of the folder is a link that leads out of it.

    The folder itself may be a link. A snapshot in the Hub's cache, and a folder in one, may link to the files
    of its own repository, which are stored beside the snapshots.

    Args:
        folder: a model's, an adapter's or a data set's.
        files: those that will be read; None: all files in it, and in those subfolders of a model that are
        read.
    """
    root = folder.resolve()
    inside = next((each for each in (root, *root.parents) if each.parent.name == "snapshots"), None)
    if inside is not None and (inside.parent.parent / "blobs").is_dir():
        root = inside.parent.parent
    for path in _entries(folder) if files is None else files:
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # circular links
            target = Path("/")
        if not target.is_relative_to(root):
            raise UserError(
                f"{folder}: {path.relative_to(folder)} is a link that leads out of the folder, where "
                "nothing is read; copy the file into it"
            )


def check_weight_map(folder: Path, index: dict, names: set[str]) -> None:
    """Raises UserError unless the files that model.safetensors.index.json names are files of the folder."""
    where = f"{folder}/model.safetensors.index.json"
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{where}: weight_map is not a table from tensors to files")
    missing = sorted(set(weight_map.values()) - names)
    strange = [name for name in missing if Path(name).name != name]
    if strange:
        raise UserError(f"{where}: expected names of files in the folder itself, found {show(strange[0])}")
    if missing:
        raise UserError(f"{folder}: {len(missing)} weight files are missing, the first is {missing[0]}")


def _entries(folder: Path) -> list[Path]:
    inner = [path for sub in _FOLDERS for path in (folder / sub, *(folder / sub).rglob("*"))]
    # Linked folders are not followed, except those that are read.
    return [path for path in folder.iterdir() if path.is_symlink() and not path.is_dir()] + inner
