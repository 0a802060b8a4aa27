"""The header of a GGUF file, of which nothing is believed before it was checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.errors import UserError, first_line, show

KINDS = {  # of tensors: number -> name, weights in a block, bytes of a block
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9
_MOST_BYTES, _MOST_TEXTS, _MOST_ENTRIES = 1 << 26, 1 << 22, 1 << 16  # of a header; real ones have a tenth
_MOST = 2**31 - 1  # MLX's shapes are int32


@attrs.frozen
class Tensor:
    """Where a tensor lies in the file."""

    kind: str
    shape: tuple[int, ...]  # outermost first, as in MLX; the file has it the other way round
    start: int
    size: int  # bytes


@attrs.frozen
class GGUF:
    """A checked header."""

    file: Path
    metadata: Mapping[str, Any]  # lists of numbers as NumPy arrays
    tensors: Mapping[str, Tensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata. Raises UserError for another type, and for none without a default."""
        found = self.metadata.get(key, default)
        if found is default and default is not None:
            return default
        if not isinstance(found, kind) or (kind is not bool and isinstance(found, bool)):
            raise UserError(f"{self.file}: {key}: expected {kind.__name__}, found {show(found)}")
        return found

    def bytes_of(self, tensor: Tensor) -> np.ndarray:
        """A tensor's bytes [size]."""
        return np.fromfile(self.file, np.uint8, tensor.size, offset=tensor.start)


def read_header(file: Path) -> GGUF:
    """The header of a GGUF file; every tensor lies in the file, and no two in one place.

    Raises UserError for anything else.
    """
    try:
        size = file.stat().st_size
        length = min(size, _MOST_BYTES)
        with (
            open(file, "rb") as stream,
            mmap.mmap(stream.fileno(), length, access=mmap.ACCESS_READ) as content,
        ):
            return _Reader(file, content, size).header()
    except (struct.error, ValueError, OSError) as error:
        cut = "the header is cut off" if isinstance(error, struct.error) else first_line(error)
        raise UserError(f"{file}: cannot be read as GGUF: {cut}") from error


class _Reader:
    def __init__(self, file: Path, content: mmap.mmap, size: int):
        self.file, self.content, self.size = file, content, size
        self.place, self.texts = 0, 0

    def header(self) -> GGUF:
        magic, version, tensor_count, count = self.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"expected GGUF of version 2 or 3, found {show(magic)} {version}")
        if max(count, tensor_count) > _MOST_ENTRIES:
            raise ValueError(
                f"expected at most {_MOST_ENTRIES:,} entries, found {max(count, tensor_count):,}"
            )
        metadata = {}
        for _ in range(count):
            key = self.text()
            metadata[key] = self.value(*self.numbers("I"))
        found = [(self.text(), *self.placed()) for _ in range(tensor_count)]
        step = metadata.get("general.alignment", 32)
        if type(step) is not int or not 1 <= step <= 1 << 16:
            raise ValueError(f"general.alignment: expected a small number, found {show(step)}")
        start = -(-self.place // step) * step
        tensors: dict[str, Tensor] = {}
        before = start
        for name, kind, shape, offset, size in sorted(found, key=lambda each: each[3]):
            begin = start + offset
            if name in tensors or begin < before:
                raise ValueError(f"the tensor {show(name)} overlaps another, or is there twice")
            before = begin + size
            if before > self.size:
                raise ValueError(f"the tensor {show(name)} ends beyond the file; is the file cut off?")
            tensors[name] = Tensor(kind, shape, begin, size)
        return GGUF(self.file, metadata, tensors)

    def take(self, size: int) -> int:
        """Steps over so many bytes and returns where they begin."""
        if size > len(self.content) - self.place:
            raise struct.error
        self.place += size
        return self.place - size

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack_from(form, self.content, self.take(struct.calcsize(form)))

    def text(self) -> str:
        self.texts += 1
        if self.texts > _MOST_TEXTS:
            raise ValueError(f"expected at most {_MOST_TEXTS:,} texts")
        (size,) = self.numbers("Q")
        begin = self.take(size)
        return self.content[begin : begin + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"expected a type of GGUF's, found {kind}")
        inner, count = self.numbers("IQ")
        if inner == _TEXT:
            return [self.text() for _ in range(count)]
        if inner not in _NUMBERS:
            raise ValueError(f"expected an array of numbers or texts, found one of the type {inner}")
        dtype = np.dtype(f"<{_NUMBERS[inner]}" if inner != 7 else "?")  # "?" has no byte order
        begin = self.take(count * dtype.itemsize)
        return np.frombuffer(self.content[begin : self.place], dtype)

    def placed(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's kind, shape, offset and size."""
        (rank,) = self.numbers("I")
        if not 1 <= rank <= 4:
            raise ValueError(f"expected 1 to 4 dimensions, found {rank}")
        shape = self.numbers(f"{rank}Q")
        number, offset = self.numbers("IQ")
        if number not in KINDS:
            known = ", ".join(name for name, _, _ in KINDS.values())
            raise ValueError(f"expected tensors of {known}, found the type {number}")
        kind, block, size = KINDS[number]
        if not all(1 <= part <= _MOST for part in shape) or shape[0] % block:
            raise ValueError(f"expected a shape in blocks of {block}, found {show(shape)}")
        return kind, tuple(reversed(shape)), offset, prod(shape) // block * size
