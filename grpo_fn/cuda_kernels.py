"""CUDA kernels of our own, by MLX's way of making them from source."""

import functools
import zlib
from typing import Any

import mlx.core as mx


def has_cuda() -> bool:
    """Whether the default device runs them."""
    return mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()


@functools.cache
def cuda_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    """The kernel, as `mx.fast.cuda_kernel` gives it.

    MLX keeps what it compiled in a folder, from one process to the next, under the kernel's name alone: the
    name given to it holds a checksum of the source, or a later version would run an earlier one's kernel.
    """
    name = f"{name}_{zlib.crc32(source.encode()):08x}"
    return mx.fast.cuda_kernel(name=name, input_names=inputs, output_names=outputs, source=source)
