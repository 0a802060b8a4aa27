"""Files that survive a crash: arrays written through to the disk, folders that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from runners.errors import UserError, first_line
from runners.tensor_header import check_header

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>new|old)-\d+")


def save_arrays(file: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file through to the disk, names sorted so that equal arrays give equal bytes."""
    ordered = dict(sorted(arrays.items()))
    mx.eval(ordered)
    with open(file, "wb") as stream:
        mx.save_safetensors(stream, ordered, metadata=dict(metadata))
        stream.flush()
        os.fsync(stream.fileno())


def save_text(file: Path, text: str) -> None:
    """Writes a text file into a folder that is there; a crash leaves the old file or the new one.

    OSError where the disk refuses, or where the folder has vanished: it is not made anew for this file alone.
    """
    part = file.with_name(f".{file.name}.new-{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
        flush(file.parent)
    finally:
        part.unlink(missing_ok=True)  # still there only after an error


def load_arrays(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The arrays and the metadata of a safetensors file; UserError where it is missing or cut off.

    The arrays are read here and now: a lazy one would change with the file under it.
    """
    check_header(file)
    try:
        arrays, metadata = cast(Any, mx.load(str(file), format="safetensors", return_metadata=True))
        mx.eval(arrays)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({first_line(error)})") from error
    return arrays, metadata


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name and place when the block ends without an error.

    Everything in it is on the disk before the rename. A crash at any point leaves the old folder or the new
    one under the name, or (between two renames) the old one beside it, which the next call restores.

    Raises UserError where the disk refuses: full, read-only, no permission.
    """
    temporary = target.parent / f".{target.name}.new-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        temporary.mkdir()
        yield temporary
        _flush(temporary)
        _put_in_place(temporary, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # still there only after an error


def remove_folder(folder: Path) -> None:
    """Deletes a folder such that no half-deleted one ever stands under its name."""
    doomed = folder.parent / f".{folder.name}.new-{os.getpid()}"
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def sweep(parent: Path) -> None:
    """Clears away what a killed run left in `parent`; a folder moved aside for a new one comes back.

    OSError where the disk refuses.
    """
    for path in parent.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if not match:
            continue
        if match["kind"] == "old" and not (parent / match["name"]).exists():
            os.rename(path, parent / match["name"])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()  # the beginning of a file


def _put_in_place(temporary: Path, target: Path) -> None:
    # A folder cannot be renamed onto a folder that has something in it.
    aside = target.parent / f".{target.name}.old-{os.getpid()}"
    replaces = target.exists()
    if replaces:
        os.rename(target, aside)
    os.rename(temporary, target)
    flush(target.parent)
    if replaces:
        shutil.rmtree(aside)


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Brings a file, or a folder's list of names, to the disk. OSError where it refuses."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
