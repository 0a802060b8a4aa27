"""Reads the header of a GGUF file. The file is untrusted, so the header is fully checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The `gguf` package defines the tensor types. Its own reader is slow and does not check bounds.
"""

import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.errors import UserError, first_line, show
from runners.machine.versions import import_extra

_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT = 8
_ARRAY = 9
# Size limit of a header; real headers have less than half.
_MOST_BYTES = 1 << 26
_MOST_READS = 1 << 21
_MOST = 2**31 - 1  # MLX's shapes are int32


@attrs.frozen
class Tensor:
    """The location of a tensor in the file."""

    kind: str
    shape: tuple[int, ...]  # outermost first, as in MLX; reversed in the file
    start: int
    size: int  # bytes


@attrs.frozen
class GGUF:
    """A checked header."""

    file: Path
    metadata: Mapping[str, Any]  # lists of numbers as NumPy arrays
    tensors: Mapping[str, Tensor]

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """Returns a metadata value.

        Raises UserError if the type differs, or if the value is missing and there is no default.
        """
        found = self.metadata.get(key, default)
        if found is default is not ...:
            return default
        if not isinstance(found, kind) or (kind is not bool and isinstance(found, bool)):
            raise UserError(f"{key}: expected {kind.__name__}, found {show(found)}")
        return found

    def numbers(self, key: str, count: int) -> list[float] | None:
        """Returns a metadata list of `count` finite numbers, or None if the key is missing.

        Raises UserError for any other value.
        """
        found = self.metadata.get(key)
        if found is None:
            return None
        if not isinstance(found, np.ndarray) or len(found) != count or not np.isfinite(found).all():
            raise UserError(f"{key}: expected {count} finite numbers, found {show(found)}")
        return found.tolist()

    def bytes_of(self, tensor: Tensor) -> np.ndarray:
        """Returns a tensor's bytes [size]."""
        return np.fromfile(self.file, np.uint8, tensor.size, offset=tensor.start)


def gguf_package() -> Any:
    """Returns the `gguf` package. Raises UserError if the package is not installed."""
    return import_extra("gguf", "gguf", "GGUF requires the package gguf")


def read_header(file: Path) -> GGUF:
    """Reads the header of a GGUF file, and checks that all tensors are inside the file and do not
    overlap.

    Raises UserError for a file that is not valid GGUF.
    """
    gguf = gguf_package()
    try:
        if not file.is_file():  # a fifo would wait for ever
            raise OSError("there is no such file")
        with open(file, "rb") as stream:
            reader = _Reader(stream.read(_MOST_BYTES))
            size = os.fstat(stream.fileno()).st_size
        magic, version, tensor_count, count = reader.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"expected GGUF version 2 or 3, found {show(magic)} {version}")
        metadata = {reader.text(): reader.value(*reader.numbers("I")) for _ in range(count)}
        found = [(reader.text(), *reader.placed(gguf)) for _ in range(tensor_count)]
        step = metadata.get("general.alignment", 32)
        if type(step) is not int or not 1 <= step <= 1 << 16:
            raise ValueError(f"general.alignment: expected a small number, found {show(step)}")
        before = start = -(-reader.place // step) * step
        tensors: dict[str, Tensor] = {}
        for name, kind, shape, offset, length in sorted(found, key=lambda each: each[3]):
            if name in tensors or start + offset < before:
                raise ValueError(f"the tensor {show(name)} overlaps another one, or occurs twice")
            before = start + offset + length
            if before > size:
                raise ValueError(
                    f"the tensor {show(name)} ends after the end of the file; is the file "
                    "truncated?"
                )
            tensors[name] = Tensor(kind, shape, start + offset, length)
        return GGUF(file, metadata, tensors)
    except (struct.error, ValueError, OSError) as error:
        reason = "the header is truncated" if isinstance(error, struct.error) else first_line(error)
        raise UserError(f"cannot be read as GGUF: {reason}") from error


@attrs.define
class _Reader:
    content: bytes
    place: int = 0
    reads: int = 0

    def take(self, size: int) -> int:
        """Skips `size` bytes and returns the offset of the first one."""
        if size > len(self.content) - self.place:
            raise struct.error
        self.place += size
        return self.place - size

    def numbers(self, form: str) -> tuple[Any, ...]:
        self.reads += 1
        if self.reads > _MOST_READS:
            raise ValueError(f"expected at most {_MOST_READS:,} texts and numbers")
        form = f"<{form}"
        return struct.unpack_from(form, self.content, self.take(struct.calcsize(form)))

    def text(self) -> str:
        (size,) = self.numbers("Q")
        return self.content[self.take(size) : self.place].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"expected a GGUF type, found {kind}")
        inner, count = self.numbers("IQ")
        if inner == _TEXT:
            return [self.text() for _ in range(count)]
        if inner not in _NUMBERS:
            raise ValueError(
                f"expected an array of numbers or texts, found elements of type {inner}"
            )
        dtype = np.dtype(_NUMBERS[inner]).newbyteorder("<")
        return np.frombuffer(self.content, dtype, count, self.take(count * dtype.itemsize))

    def placed(self, gguf: Any) -> tuple[str, tuple[int, ...], int, int]:
        """Reads a tensor's kind, shape, offset and size."""
        (rank,) = self.numbers("I")
        if not 1 <= rank <= 4:
            raise ValueError(f"expected 1 to 4 dimensions, found {rank}")
        shape = self.numbers(f"{rank}Q")
        number, offset = self.numbers("IQ")
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if not all(1 <= part <= _MOST for part in shape) or shape[0] % block:
            raise ValueError(
                f"expected a shape that is divisible into blocks of {block}, found {show(shape)}"
            )
        return kind.name, tuple(reversed(shape)), offset, prod(shape) // block * size
