"""Checks safetensors files before MLX reads them."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runners.errors import UserError, first_line, show, user_errors

if TYPE_CHECKING:
    import mlx.core as mx


_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def save_arrays(file: Path, arrays: "Mapping[str, mx.array]", metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file whose names are sorted, so equal arrays produce equal bytes."""
    import mlx.core as mx

    ordered = dict(sorted(arrays.items()))
    mx.eval(ordered)
    with open(file, "wb") as stream:
        mx.save_safetensors(stream, ordered, metadata=dict(metadata))


def load_arrays(file: Path) -> "tuple[dict[str, mx.array], dict[str, str]]":
    """Reads the arrays and the metadata of a safetensors file. Raises UserError if the file is
    missing or truncated.

    The arrays are read immediately, because a lazy array would change if the file changed.
    """
    import mlx.core as mx

    check_header(file)
    with user_errors(
        f"{file}: cannot be read as safetensors", OSError, RuntimeError, why=first_line
    ):
        arrays, metadata = cast(Any, mx.load(str(file), format="safetensors", return_metadata=True))
        mx.eval(arrays)
    return arrays, metadata


def weight_files(folder: Path) -> list[Path]:
    """Returns a model folder's weight files, sorted by name.

    Raises the errors of `check_header`. Also raises UserError if two files contain the same tensor,
    because mlx-lm could use either one.
    """
    files = sorted(folder.glob("model*.safetensors"))
    holders: dict[str, str] = {}
    for file in files:
        names = check_header(file)
        shared = sorted(holders.keys() & names)
        if shared:
            raise UserError(
                f"{folder}: expected each tensor once, found {show(shared[0])} in "
                f"{holders[shared[0]]} and in {file.name}; remove the older model's file"
            )
        holders |= dict.fromkeys(names, file.name)
    return files


def check_header(file: Path) -> list[str]:
    """Returns the names of a file's tensors, after checking its header.

    Raises UserError unless the file contains every tensor in the header, with the number of bytes
    that its shape requires. MLX does not check this: it counts elements in 64 bits, and accepts
    shapes whose product overflows and pairs of negative sizes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not file.is_file():
            raise OSError("no such file" if not file.exists() else "expected a regular file")
        with safe_open(file, framework="np") as opened:
            return opened.keys()
    except (OSError, SafetensorError) as error:
        cut = "; is the file truncated?" if isinstance(error, SafetensorError) else ""
        raise UserError(
            f"{file}: cannot be read as safetensors: {first_line(error)}{cut}"
        ) from error


def stated_dtype(folder: Path) -> str:
    """Returns the floating dtype of most tensors in a model folder's weight files, or "" if
    unknown. Only the files' headers are read.
    """
    from safetensors import SafetensorError, safe_open

    found: Counter[str] = Counter()
    with suppress(OSError, SafetensorError):  # the error is reported when the model is loaded
        for file in folder.glob("model*.safetensors"):
            with safe_open(file, framework="np") as opened:
                found.update(part.get_dtype() for part in map(opened.get_slice, opened.keys()))
    return next((_FLOATS[name] for name, _ in found.most_common() if name in _FLOATS), "")
