"""Files that survive a crash: arrays written through to the disk, folders that appear whole or not at all.

`within` is a descriptor of the folder that a path lies in. With it, everything happens in that folder, even
if the path leads into another one by now; messages still use the path.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runners.errors import UserError, first_line
from runners.files.staging import NEW, OLD, staging, sweep
from runners.files.tensor_header import check_header

if TYPE_CHECKING:
    import mlx.core as mx

# How a full or read-only disk shows in the exceptions of MLX, and of libraries written in Rust.
_MLX_WRITE = "[write] Unable to write"
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_PROBE = 1 << 16  # bytes


def save_arrays(file: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file through to the disk, names sorted so that equal arrays give equal bytes."""
    import mlx.core as mx

    ordered = dict(sorted(arrays.items()))
    mx.eval(ordered)
    with open(file, "wb") as stream:
        mx.save_safetensors(stream, ordered, metadata=dict(metadata))
        stream.flush()
        os.fsync(stream.fileno())


def save_text(file: Path, text: str, *, within: int | None = None) -> None:
    """Writes a text file into a folder that is there; a crash leaves the old file or the new one.

    OSError where the disk refuses, or where the folder has vanished: it is not made anew for this file alone.
    """
    with opened(file.parent, within) as parent:
        sweep(parent)
        _save_text(parent, file.name, text)


def _save_text(parent: int, name: str, text: str) -> None:
    with staging(parent, name) as stage:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(NEW, flags, 0o666, dir_fd=stage.folder), "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(NEW, name, src_dir_fd=stage.folder, dst_dir_fd=parent)
        os.fsync(parent)


def load_arrays(file: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The arrays and the metadata of a safetensors file; UserError where it is missing or cut off.

    The arrays are read here and now: a lazy one would change with the file under it.
    """
    import mlx.core as mx

    check_header(file)
    try:
        arrays, metadata = cast(Any, mx.load(str(file), format="safetensors", return_metadata=True))
        mx.eval(arrays)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{file}: cannot be read as safetensors ({first_line(error)})") from error
    return arrays, metadata


def check_target(target: Path, force: bool) -> None:
    """Before the work on a new folder: raises UserError where `target` exists, unless `force` replaces it.

    What a killed process had moved aside comes back first: it counts as being there.
    """
    if target.name in ("", ".."):
        raise UserError(f"{target}: this folder cannot be replaced; wanted the name of a new one")
    try:
        if target.parent.is_dir():
            with opened(target.parent) as parent:
                sweep(parent)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
    if os.path.lexists(target) and not force:
        raise UserError(_exists(target))


@contextmanager
def new_folder(target: Path, *, replace: bool = True, within: int | None = None) -> Iterator[Path]:
    """A folder that takes the name and place of `target` when the block ends without an error.

    Everything in it is on the disk before the rename. A crash at any point leaves the old folder or the new
    one under the name, or (between two renames) the old one beside it, which the next start restores.

    Raises UserError where the disk refuses (full, read-only, no permission), and where `target` has come to
    exist without `replace`.
    """
    placed = False
    try:
        if within is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        with opened(target.parent, within) as parent:
            sweep(parent)
            with staging(parent, target.name) as stage:
                os.mkdir(NEW, dir_fd=stage.folder)
                folder = target.parent / stage.name / NEW
                with _disk_errors(target, stage.folder):
                    yield folder
                _flush(folder)
                stage.put(replace=replace)
                os.fsync(parent)
                placed = True
    except OSError as error:
        if placed:  # the old folder cannot be removed yet: the next start tries again
            return
        if not replace and os.path.lexists(target):
            raise UserError(_exists(target)) from error
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error


def remove_folder(folder: Path, *, within: int | None = None) -> None:
    """Deletes a folder such that no half-deleted one ever stands under its name. OSError where that fails."""
    with opened(folder.parent, within) as parent, staging(parent, folder.name) as stage:
        os.rename(folder.name, OLD, src_dir_fd=parent, dst_dir_fd=stage.folder)


@contextmanager
def opened(folder: Path, within: int | None = None) -> Iterator[int]:
    """A descriptor of a folder: `within` if given, else a new one. OSError where there is no such folder."""
    if within is not None:
        yield within
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def flush(path: Path | str, *, within: int | None = None) -> None:
    """Brings a file, or a folder's list of names, to the disk. OSError where it refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=within)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists(target: Path) -> str:
    return f"{target}: this exists; --force replaces it"


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


@contextmanager
def _disk_errors(target: Path, staged: int) -> Iterator[None]:
    """Turns exceptions into UserErrors where they come from a write that the disk refused."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        reason = _refusal(error, staged)
        if reason is None:
            raise
        raise UserError(f"{target}: cannot be written: {reason}") from error


def _refusal(error: Exception, staged: int) -> str | None:
    """Why the disk refused a write, where MLX or a library in Rust failed for that; None: for another reason.

    They raise RuntimeError or Exception, not OSError. MLX does not name the reason: a file of our own, into
    the same folder, meets it again.
    """
    text = str(error.__cause__ if isinstance(error, UserError) else error)
    found = _RUST_ERROR.search(text)
    if found and int(found[1]) in _REFUSALS:
        return os.strerror(int(found[1]))
    if not text.startswith(_MLX_WRITE):
        return None
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(NEW + "/probe", flags, 0o600, dir_fd=staged), "wb") as stream:
            stream.write(bytes(_PROBE))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as refused:
        return refused.strerror or str(refused)
    return first_line(error)
