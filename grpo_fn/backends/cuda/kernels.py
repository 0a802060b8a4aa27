"""Custom CUDA kernels: NVRTC compiles their source, and MLX launches the result.

`mx.fast.cuda_kernel` also compiles and launches kernels, but takes 1.3 s per kernel and process,
because it reads MLX's headers each time. The sources here need no headers, and compile in a small
fraction of that time.
"""

import ctypes
import functools
import re
import zlib
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from grpo_fn.backends.mechanisms import has_cuda

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_TYPES = {
    mx.float32: "float",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned int",
    mx.uint8: "unsigned char",
}
# 16-bit numbers, rounded to nearest, and definitions that C++ normally has in a header.
_PRELUDE = """
#define INFINITY __int_as_float(0x7f800000)
struct float16 {
    unsigned short bits;
    float16() = default;
    __device__ float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
};
struct bfloat16 {
    unsigned short bits;
    bfloat16() = default;
    __device__ bfloat16(float x) {
        const unsigned int whole = __float_as_uint(x);
        const bool is_nan = (whole & 0x7fffffff) > 0x7f800000;
        bits = is_nan ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};
"""
# Matches `x_shape[0]` in a kernel's source; passed as a scalar.
_SIZE = re.compile(r"\b(\w+)_shape\[(\d)\]")


def takes_dtype(dtype: mx.Dtype) -> bool:
    """Returns whether this machine has CUDA and the kernels support this dtype (one of three
    floating dtypes).
    """
    return has_cuda() and dtype in (mx.float16, mx.bfloat16, mx.float32)


def literal(number: float) -> str:
    """Returns a number as text for a kernel's source. If the number were an argument, it would be
    in host memory, and each launch would wait for it. Each distinct number requires a separate
    kernel.
    """
    return f"({number:.9e}f)"


class CudaKernel:
    """A CUDA kernel. Its source is the body of a function that refers to inputs and outputs by
    name.
    """

    def __init__(
        self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str
    ) -> None:
        """Stores the source, which may refer to sizes of inputs, for example `x_shape[0]`."""
        self._name, self._inputs, self._outputs = name, inputs, outputs
        self._sizes = tuple(
            dict.fromkeys((found[1], int(found[2])) for found in _SIZE.finditer(source))
        )
        self._body = _SIZE.sub(r"\1_shape_\2", source)
        self._compiled: dict[Any, tuple[str, bytes]] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
        shared_memory: int = 0,
    ) -> list[mx.array]:
        """Launches the kernel and returns its outputs.

        Args:
            inputs: arrays in the order of their names, copied if they are not contiguous.
            template: names in the source, each with a dtype, number or bool.
            grid: number of threads.
            threadgroup: number of threads per block.
            output_shapes, output_dtypes: shapes and dtypes of the outputs.
            init_value: the outputs' initial value; None leaves it undefined.
            shared_memory: bytes per block in addition to those in the source.
        """
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        key = (threads, *template, *(a.dtype for a in inputs), *output_dtypes)
        if key not in self._compiled:
            name, source = self.source(
                template, [a.dtype for a in inputs], list(output_dtypes), threads
            )
            self._compiled[key] = (
                name,
                compiled_source(source, str(mx.device_info()["architecture"])),
            )
        name, code = self._compiled[key]
        by_name = dict(zip(self._inputs, inputs, strict=True))
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=code,
            inputs=list(inputs),
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            scalars=[by_name[name].shape[axis] for name, axis in self._sizes],
            grid=grid,
            threadgroup=threadgroup,
            init_value=init_value,
            shared_memory=shared_memory,
            ensure_row_contiguous=True,
        )

    def source(
        self,
        template: Sequence[tuple[str, Any]],
        inputs: Sequence[mx.Dtype],
        outputs: Sequence[mx.Dtype],
        threads: int,
    ) -> tuple[str, str]:
        """Returns a unique name for the kernel, given types and threads per block, and the complete
        source.

        MLX caches programs by name, so the name contains a checksum of the source.
        """
        arguments = [f"const {_TYPES[t]}* {n}" for n, t in zip(self._inputs, inputs, strict=True)]
        arguments += [f"{_TYPES[t]}* {n}" for n, t in zip(self._outputs, outputs, strict=True)]
        arguments += [f"const int {name}_shape_{axis}" for name, axis in self._sizes]
        constants = [
            f"using {name} = {_TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr {type(value).__name__} {name} = {str(value).lower()};"
            for name, value in template
        ]
        body = "\n".join([", ".join(arguments) + ") {", *constants, self._body, "}"])
        head = f'extern "C" __global__ void __launch_bounds__({threads})'
        name = f"{self._name}_{zlib.crc32((head + body).encode()):08x}"
        return name, f"{_PRELUDE}{head} {name}({body}\n"


@functools.cache
def cuda_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str) -> Any:
    """Creates a `CudaKernel` or, without NVRTC, an `mx.fast.cuda_kernel`, which is called in the
    same way.
    """
    if _nvrtc() is not None:
        return CudaKernel(name, inputs, outputs, source)
    # MLX caches compiled kernels only by their names.
    name = f"{name}_{zlib.crc32(source.encode()):08x}"
    return mx.fast.cuda_kernel(name=name, input_names=inputs, output_names=outputs, source=source)


def compiles(least: str) -> bool:
    """Returns whether NVRTC is available and the device has at least this architecture, such as
    "sm_80".
    """
    architecture = str(mx.device_info().get("architecture", ""))
    return _nvrtc() is not None and _generation(architecture) >= _generation(least)


def _generation(architecture: str) -> int:
    found = re.fullmatch(r"sm_(\d+)a?", architecture)
    return int(found[1]) if found else 0


@attrs.frozen
class DeviceLimits:
    """The device limits that a kernel may depend on."""

    multiprocessors: int
    shared_bytes: int  # per block of threads that requests them


@functools.cache
def device_limits() -> DeviceLimits | None:
    """Returns the limits of MLX's device, or None if CUDA's driver does not report them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    values = []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, …MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    for attribute in (16, 97):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        values.append(value.value)
    return DeviceLimits(multiprocessors=values[0], shared_bytes=values[1])


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """Returns CUDA's compiler, which is the library that MLX has loaded."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compiled_source(source: str, architecture: str) -> bytes:
    """Compiles CUDA source to machine code for an architecture such as "sm_90".

    Raises:
        RuntimeError: NVRTC rejects the source; the error contains NVRTC's message.
    """
    library = _nvrtc()
    assert library is not None
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()

    def call(function: str, *arguments: Any) -> int:
        return getattr(library, function)(*arguments)

    def text(size_of: str, content: str) -> bytes:
        call(size_of, program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        call(content, program, found)
        return found.raw

    if call(
        "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    ):
        raise RuntimeError("NVRTC could not create a program")
    try:
        words = (
            f"--gpu-architecture={architecture}",
            "--std=c++17",
            "--device-as-default-execution-space",
        )
        options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        if call("nvrtcCompileProgram", program, len(options), options):
            log = (
                text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                .rstrip(b"\0")
                .decode(errors="replace")
            )
            raise RuntimeError(f"NVRTC rejected a kernel for {architecture}:\n{log}")
        return text("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))
