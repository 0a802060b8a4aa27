"""A short name for a model's weights: which base adapters were made for, and whether it is still that one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

WHOLE = 65_536  # numbers: a leaf of no more is read whole
SAMPLED = 16_384  # numbers of a larger one, spread over all of it


def base_digest(leaves: Mapping[str, mx.array]) -> str:
    """A SHA-256 of the leaves' names, shapes and numbers, in hexadecimal digits.

    Of a leaf of more than WHOLE numbers, SAMPLED of them are read, at the same places each time: another
    model, or one that was trained on, differs in nearly all numbers. Floating ones are taken as float32, so
    that a model that was saved with more bits than it has keeps its digest.
    """
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
    """Multiples of an odd number modulo the size, so that they meet no column of a matrix again and again."""
    steps = np.arange(SAMPLED, dtype=np.uint64) * np.uint64(2_654_435_761)
    return (steps % np.uint64(size)).astype(np.uint32)
