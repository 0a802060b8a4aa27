"""CUDA kernels of our own, by MLX's way of making them from source."""

import functools
import zlib
from typing import Any

import mlx.core as mx

from grpo_fn.backends.mechanisms import has_cuda


def takes_dtype(dtype: mx.Dtype) -> bool:
    """Whether kernels that are written for any of three floating dtypes run here on this one."""
    return has_cuda() and dtype in (mx.float16, mx.bfloat16, mx.float32)


def literal(number: float) -> str:
    """The number in a kernel's source: one handed over would lie in memory that the host writes to, and each
    launch would wait for it. Every number is a kernel of its own.
    """
    return f"({number:.9e}f)"


@functools.cache
def cuda_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    """The kernel, as `mx.fast.cuda_kernel` gives it.

    MLX keeps what it compiled in a folder, from one process to the next, under the kernel's name alone: the
    name given to it holds a checksum of the source, or a later version would run an earlier one's kernel.
    """
    name = f"{name}_{zlib.crc32(source.encode()):08x}"
    return mx.fast.cuda_kernel(name=name, input_names=inputs, output_names=outputs, source=source)
