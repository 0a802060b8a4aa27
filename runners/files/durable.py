"""Files that survive a crash: arrays flushed to the disk, folders that appear completely or not at all.

`within` is a descriptor of a path's parent folder. With it, everything happens in that folder, even if the
path now leads into another one; messages still use the path.
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

# Texts of a full or read-only disk in the exceptions of MLX and of Rust libraries.
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
    """Writes a text file into an existing folder; a crash leaves the old file or the new one.

    OSError if the disk refuses, or if the folder is gone: it is not created again for this file.
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
    """The arrays and the metadata of a safetensors file. Raises UserError if it is missing or cut off.

    The arrays are read at once: a lazy array would change if the file changed.
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
    """Before the work on a new folder: raises UserError if `target` exists, unless `force` replaces it.

    A folder that a killed process had moved aside is restored first, and so counts as existing.
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

    Raises UserError if the disk refuses (full, read-only, no permission), and if `target` exists at the end
    without `replace`.
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
    """Deletes a folder so that its name never shows a half-deleted one. OSError if that fails."""
    with opened(folder.parent, within) as parent, staging(parent, folder.name) as stage:
        os.rename(folder.name, OLD, src_dir_fd=parent, dst_dir_fd=stage.folder)


@contextmanager
def opened(folder: Path, within: int | None = None) -> Iterator[int]:
    """A descriptor of a folder: `within` if given, else a new one. OSError if the folder does not exist."""
    if within is not None:
        yield within
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def flush(path: Path | str, *, within: int | None = None) -> None:
    """Flushes a file, or a folder's list of names, to the disk. OSError if the disk refuses."""
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
    """Turns exceptions into UserErrors if they come from a write that the disk refused."""
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
    """Why the disk refused a write, if MLX or a Rust library failed for that reason; else None.

    They raise RuntimeError or Exception, not OSError. MLX does not name the reason, so a test file is written
    into the same folder to find it.
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
