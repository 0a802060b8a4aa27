"""The manifest of a checkpoint: its files with their sizes and digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from runners.checkpoints.run_folder import checkpoint_folders
from runners.errors import UserError, show
from runners.files.json_files import read_json
from runners.files.run_files import RESOLVED

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "grpo_fn.checkpoint"


class Damaged(UserError):
    """A checkpoint whose files do not match its manifest."""


def write_manifest(folder: Path) -> None:
    """Writes manifest.json for all files in the folder. OSError if the disk refuses."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    content = {"format": MANIFEST_FORMAT, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_manifest(folder: Path, wanted: tuple[str, ...] = ()) -> None:
    """Raises Damaged unless every file, including those of `wanted`, is there as it was written."""
    if folder.is_symlink() or not folder.is_dir():
        raise Damaged(f"{folder}: expected a folder, found {'a link' if folder.is_symlink() else 'none'}")
    # Links are not followed, so that no name of the manifest leads out of the folder.
    present = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    if MANIFEST not in present:
        raise Damaged(f"{folder}: {MANIFEST} is missing, so it cannot be checked")
    try:
        content = read_json(folder / MANIFEST)
    except UserError as error:
        raise Damaged(str(error)) from error
    found, files = content.get("format"), content.get("files")
    if found != MANIFEST_FORMAT:
        raise Damaged(f"{folder / MANIFEST}: expected the format {MANIFEST_FORMAT}, found {show(found)}")
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise Damaged(f"{folder / MANIFEST}: its table of files is damaged")
    if lacking := [name for name in wanted if name not in files]:
        raise Damaged(f"{folder / MANIFEST}: {lacking[0]} is not among its files")
    for name, facts in files.items():
        path = present.get(name)
        if path is None:
            raise Damaged(f"{folder}: expected a file {show(name)} in the folder, found none or a link")
        try:
            size, content = path.stat().st_size, digest(path)
        except OSError as error:
            raise Damaged(f"{path}: cannot be read: {error.strerror or error}") from error
        if size != facts.get("size"):
            raise Damaged(f"{path}: expected {show(facts.get('size'))} bytes, found {size}")
        if content != facts.get("sha256"):
            raise Damaged(f"{path}: its content is not what was written (SHA-256)")


def newest_whole(folder: Path, wanted: tuple[str, ...], note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint in a folder whose files match its manifest.

    `note` gets a line for each damaged one.
    """
    for path in reversed(checkpoint_folders(folder).values()):
        try:
            check_manifest(path, wanted)
        except Damaged as error:
            note(f"{error}; {path.name} is skipped")
        else:
            return path
    return None


def model_of_run(name: str, note: Callable[[str], None]) -> str:
    """The model of a run's folder: `final`, else its newest whole checkpoint.

    Any other name is returned as it is. `note` gets a line if a checkpoint is used, and for each damaged one.
    Raises UserError if the run has neither.
    """
    folder = Path(name).expanduser()
    if not (folder / RESOLVED).is_file():
        return name
    if (folder / "final").is_dir():
        return str(folder / "final")
    path = newest_whole(folder, (), note)
    if path is None:
        raise UserError(f"{name}: this run has no final model and no whole checkpoint")
    note(f"{name}: this run has no final model; using its newest whole checkpoint, {path.name}")
    return str(path)


def digest(path: Path) -> str:
    """A file's SHA-256, in hexadecimal digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
