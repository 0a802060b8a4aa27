"""The header of a safetensors file, checked before MLX reads it.

MLX checks much itself, but counts a tensor's elements in 64 bits: it accepts a shape whose product overflows,
and negative dimensions in pairs. Format: 8 bytes with the header's length, little-endian; the header, a
JSON object of dtype, shape and data_offsets for each tensor; the data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from runners.errors import UserError, show

_MAX_HEADER = 100_000_000  # bytes; the reference implementation's bound too
_MAX_DIMENSION = 2**31 - 1  # MLX's shapes are int32
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
}
_BITS |= {"BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}


def check_header(file: Path) -> None:
    """Raises UserError unless every tensor of the header is in the file, with the size of its shape."""
    fault = _header_fault(file)
    if fault:
        raise UserError(f"{file}: cannot be read as safetensors: {fault}")


def _header_fault(file: Path) -> str | None:
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                return f"its header would have {length:,} bytes, of {size:,} in all"
            header = json.loads(stream.read(length))
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, RecursionError):
        return "its header is no JSON"
    if not isinstance(header, dict):
        return f"its header is {type(header).__name__}, wanted a table of tensors"
    for name, entry in header.items():
        fault = None if name == "__metadata__" else _fault(entry, size - 8 - length)
        if fault:
            return f"the tensor {show(name)} {fault}"
    return None


def _fault(entry: Any, room: int) -> str | None:
    """The fault of one tensor's entry, if any; `room` bytes of data follow the header."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return f"is described by {show(entry)}, wanted dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or any(part > _MAX_DIMENSION for part in shape):
        return f"has the shape {show(shape)}, wanted a list of int32 numbers from 0 on"
    if not _are_counts(offsets) or len(offsets) != 2:
        return f"has the data_offsets {show(offsets)}, wanted [begin, end]"
    if not isinstance(dtype, str) or dtype not in _BITS:
        return f"has the dtype {show(dtype)}, which MLX does not know"
    begin, end = offsets
    wanted = math.prod(shape) * _BITS[dtype] // 8
    if not begin <= end <= room:
        return f"lies from byte {begin:,} to {end:,} of {room:,}: the file is cut off, or its header wrong"
    if end - begin != wanted:
        return f"has {end - begin:,} bytes, but its shape {show(shape)} in {dtype} takes {wanted:,}"
    return None


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
