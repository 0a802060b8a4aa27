"""Files that survive a crash: flushed to the disk, and there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runners.errors import UserError, first_line
from runners.files.staging import NEW, OLD, put, staging, sweep
from runners.files.tensor_header import check_header

if TYPE_CHECKING:
    import mlx.core as mx

# Texts of a full or read-only disk in the exceptions of MLX and of Rust libraries.
_MLX_WRITE = "[write] Unable to write"
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def save_arrays(file: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file through to the disk, names sorted so that equal arrays give equal bytes."""
    import mlx.core as mx

    ordered = dict(sorted(arrays.items()))
    mx.eval(ordered)
    with open(file, "wb") as stream:
        mx.save_safetensors(stream, ordered, metadata=dict(metadata))
        stream.flush()
        os.fsync(stream.fileno())


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


def save_text(file: Path, text: str) -> None:
    """Writes a text file into an existing folder; a crash leaves the old file or the new one.

    OSError if the disk refuses, or if the folder is gone: it is not created again for this file.
    """
    sweep(file.parent)
    with staging(file) as stage:
        with open(stage / NEW, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(stage / NEW, file)
        flush(file.parent)


def check_target(target: Path, force: bool) -> None:
    """Before the work on a new folder: raises UserError if `target` exists, unless `force` replaces it.

    A folder that a killed process had moved aside is restored first, and so counts as existing.
    """
    if target.name in ("", ".."):
        raise UserError(f"{target}: this folder cannot be replaced; expected the name of a new one")
    try:
        sweep(target.parent)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error
    if os.path.lexists(target) and not force:
        raise UserError(_exists(target))


@contextmanager
def new_folder(target: Path, *, replace: bool = True) -> Iterator[Path]:
    """A folder that takes the name and place of `target` when the block ends without an error.

    Everything in it is on the disk before the rename. A crash at any point leaves the old folder or the new
    one under the name, or (between two renames) the old one beside it, which the next start restores.

    Raises UserError if the disk refuses (full, read-only, no permission), and if `target` exists at the end
    without `replace`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        with staging(target) as stage:
            (stage / NEW).mkdir()
            with _disk_errors(target, stage):
                yield stage / NEW
            for path in (*(stage / NEW).rglob("*"), stage / NEW):
                flush(path)
            put(stage, target, replace=replace)
            flush(target.parent)
    except OSError as error:
        if not replace and os.path.lexists(target):
            raise UserError(_exists(target)) from error
        raise UserError(f"{target}: cannot be written: {error.strerror or error}") from error


def remove_folder(folder: Path) -> None:
    """Deletes a folder so that its name never shows a half-deleted one. OSError if that fails."""
    with staging(folder) as stage:
        os.rename(folder, stage / OLD)


def flush(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk. OSError if the disk refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists(target: Path) -> str:
    return f"{target}: this exists; --force replaces it"


@contextmanager
def _disk_errors(target: Path, stage: Path) -> Iterator[None]:
    """Turns exceptions into UserErrors if they come from a write that the disk refused.

    MLX and Rust libraries raise RuntimeError or Exception, not OSError. MLX does not name the reason, so that
    a test file is written into the same folder to find it.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        text = str(error.__cause__ if isinstance(error, UserError) else error)
        found = _RUST_ERROR.search(text)
        if found and int(found[1]) in _REFUSALS:
            reason = os.strerror(int(found[1]))
        elif text.startswith(_MLX_WRITE):
            reason = _refusal(stage) or first_line(error)
        else:
            raise
        raise UserError(f"{target}: cannot be written: {reason}") from error


def _refusal(stage: Path) -> str | None:
    """Why the disk refuses 64 kB more; None: it takes them."""
    try:
        with open(stage / NEW / "probe", "wb") as stream:
            stream.write(bytes(1 << 16))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as refused:
        return refused.strerror or str(refused)
    return None
