"""The header of a safetensors file, checked by safetensors itself before MLX reads the file.

MLX counts a tensor's elements in 64 bits: it accepts a shape whose product overflows, and negative dimensions
in pairs.
"""

from __future__ import annotations

from pathlib import Path

from runners.errors import UserError, first_line, show

_MOST = 2**31 - 1  # MLX's shapes are int32


def check_header(file: Path) -> None:
    """Raises UserError unless every tensor of the header is in the file, with the size of its shape."""
    from safetensors import SafetensorError, safe_open

    try:
        if not file.is_file():
            raise OSError("no such file" if not file.exists() else "expected a regular file")
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                shape = opened.get_slice(name).get_shape()
                if any(part > _MOST for part in shape):
                    raise ValueError(f"the tensor {show(name)} has the shape {show(shape)}, beyond int32")
    except (OSError, ValueError, SafetensorError) as error:
        cut = "; is the file cut off?" if isinstance(error, SafetensorError) else ""
        raise UserError(f"{file}: cannot be read as safetensors: {first_line(error)}{cut}") from error
