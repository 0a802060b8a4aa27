"""A digest of a model's weights, to check that adapters are used with the base they were made for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

WHOLE = 65_536  # numbers: a leaf of at most this size is read whole
SAMPLED = 16_384  # numbers of a larger leaf, spread over all of it


def base_digest(leaves: Mapping[str, mx.array]) -> str:
    """A SHA-256 of the leaves' names, shapes and numbers, in hexadecimal digits.

    For a leaf of more than WHOLE numbers, SAMPLED of them are read, at the same places each time: another
    model, or a further trained one, differs in nearly all numbers. Floating numbers are read as float32, so
    that a model saved with more bits keeps its digest. It is computed on
    the CPU: a GPU would first compile a program.
    """
    with mx.stream(mx.cpu):
        samples = {name: _sample(leaf) for name, leaf in sorted(leaves.items())}
        mx.eval(samples)
    whole = hashlib.sha256()
    for name, sample in samples.items():
        whole.update(f"{name} {leaves[name].shape}\n".encode())
        whole.update(np.array(sample).tobytes())
    return whole.hexdigest()


def _sample(leaf: mx.array) -> mx.array:
    flat = leaf.reshape(-1)
    if flat.size > WHOLE:
        flat = flat[mx.array(_places(flat.size))]
    floating: Any = mx.issubdtype(flat.dtype, mx.floating)
    return mx.contiguous(flat.astype(mx.float32) if floating else flat)


def _places(size: int) -> np.ndarray:
    """Multiples of an odd number modulo the size, so that they do not meet the same columns of a matrix."""
    steps = np.arange(SAMPLED, dtype=np.uint64) * np.uint64(2_654_435_761)
    return (steps % np.uint64(size)).astype(np.uint32)
