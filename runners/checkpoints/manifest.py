"""Writes and checks a checkpoint's manifest, which lists its files and their digests."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from runners.checkpoints.run_folder import checkpoint_folders
from runners.errors import UserError, show
from runners.files.durable import disk_errors
from runners.files.json_files import read_json, write_json
from runners.files.run_files import RESOLVED

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Writes manifest.json for all files in the folder. Raises OSError if writing fails."""
    names = (
        path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()
    )
    files = {name: {"sha256": digest(folder / name)} for name in names if name != MANIFEST}
    write_json(folder / MANIFEST, {"files": files})


def check_manifest(folder: Path) -> None:
    """Raises UserError unless every file in the manifest exists unchanged."""
    files = read_json(folder / MANIFEST).get("files")
    if not isinstance(files, dict) or not all(isinstance(facts, dict) for facts in files.values()):
        raise UserError(f"{folder / MANIFEST}: the list of files is damaged")
    # Links are not followed, so that no name in the manifest refers to a file outside the folder.
    present = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    for name, facts in files.items():
        path = present.get(name)
        if path is None:
            raise UserError(
                f"{folder}: expected a file {show(name)} in the folder, found none or a link"
            )
        with disk_errors(f"{path}: cannot be read"):
            found = digest(path)
        if found != facts.get("sha256"):
            raise UserError(f"{path}: its content has changed (SHA-256)")


def newest_whole(folder: Path, note: Callable[[str], None]) -> Path | None:
    """Returns the newest checkpoint in a folder that matches its manifest, or None if there is no
    such checkpoint.

    `note` receives a message for each damaged checkpoint.
    """
    for path in reversed(checkpoint_folders(folder).values()):
        try:
            check_manifest(path)
        except UserError as error:
            note(f"{error}; {path.name} is skipped")
        else:
            return path
    return None


def model_of_run(name: str, note: Callable[[str], None]) -> str:
    """Returns the model in a run's folder: `final`, or the newest complete checkpoint.

    If `name` is not a run's folder, it is returned unchanged. `note` receives a message if a
    checkpoint is used, and for each damaged checkpoint. Raises UserError if the run has neither a
    final model nor a complete checkpoint.
    """
    folder = Path(name).expanduser()
    if not (folder / RESOLVED).is_file():
        return name
    if (folder / "final").is_dir():
        return str(folder / "final")
    path = newest_whole(folder, note)
    if path is None:
        raise UserError(f"{name}: this run has no final model and no complete checkpoint")
    note(
        f"{name}: this run has no final model; its newest complete checkpoint, {path.name}, is used"
    )
    return str(path)


def digest(path: Path) -> str:
    """Returns a file's SHA-256 digest in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
