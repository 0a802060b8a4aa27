"""Describes the machine of the figures: hardware, versions, and the rates for the floors."""

from __future__ import annotations

import ctypes
import functools
import os
import platform as system
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import mlx.core as mx

import grpo_fn
from benchmarks.harness.measure import timed
from grpo_fn.backends.composed import exp
from runners.machine import startup
from runners.machine.memory_readings import total_memory
from runners.machine.versions import installed_version


@attrs.frozen
class Rates:
    """The best rates of this machine with MLX in float32, measured now; they are the denominators
    of every floor.
    """

    matmul: float  # FLOP/s of a large square product
    exp: float  # elements/s of the core's exp
    copy: float  # bytes/s, read and written, of a + 1
    read: float  # bytes/s at which a product with one vector reads its matrix
    matmul_bf16: float | None = None  # FLOP/s in bfloat16; only on a GPU, no CPU computes in it

    @property
    def matmul_here(self) -> float:
        """FLOP/s in the compute dtype of a run on this machine."""
        return self.matmul_bf16 or self.matmul


@functools.cache
def rates(quick: bool = False) -> Rates:
    """Measures the rates in a second or two (with `quick`, roughly and with small arrays)."""
    on_gpu = backend() != "cpu"
    n, elements = (8192, 2**28) if on_gpu else (1536, 2**24)
    if quick:
        n, elements = (256, 2**18)
    a_nn = mx.random.normal((n, n), key=mx.random.key(0))
    b_nn = a_nn.astype(mx.bfloat16)
    x_n = mx.random.normal((elements,), key=mx.random.key(1))
    wide_rn = x_n.reshape(2 ** (x_n.size.bit_length() // 2), -1)  # far larger than any cache
    column_n1 = mx.ones((wide_rn.shape[1], 1))
    mx.eval(a_nn, b_nn, x_n, column_n1)

    def seconds(call: Callable[[], mx.array]) -> float:
        return timed(call, repeats=3 if quick else 9, warmup=2).median

    return Rates(
        matmul=2 * n**3 / seconds(lambda: a_nn @ a_nn),
        exp=elements / seconds(lambda: exp(x_n)),
        copy=2 * x_n.nbytes / seconds(lambda: x_n + 1),
        read=x_n.nbytes / seconds(lambda: wide_rn @ column_n1),
        matmul_bf16=2 * n**3 / seconds(lambda: b_nn @ b_nn) if on_gpu else None,
    )


@functools.cache
def backend() -> str:
    """ "metal", "cuda" or "cpu": the key under which a result is kept."""
    return startup.prepare().backend


def machine(packages: Sequence[str] = ()) -> dict[str, str | int | float]:
    """Hardware, libraries and versions, including these packages, in the form for a result."""
    found = startup.prepare()
    threads = [os.environ.get(f"{name}_NUM_THREADS") for name in ("OPENBLAS", "MKL", "OMP")]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory_gb": round(total_memory() / 1e9, 1),
        "device": found.device,
        "system": f"{system.system()} {system.machine()}",
        "blas": _blas_name(found.blas),
        "blas_threads": next(filter(None, threads), "all"),
        "load": round(os.getloadavg()[0], 1),  # above the number of cores: others were at work
        "python": system.python_version(),
        "grpo_fn": grpo_fn.__version__,
        **{name: installed_version(name) or "none" for name in ("mlx", "mlx-lm", *packages)},
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.is_file() else None
    if found:
        return found[1].strip()
    if system.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if said:
            return said
    return system.processor() or system.machine()


def _blas_name(library: str | None) -> str:
    """The library, with the version and kernels that it reports if it is an OpenBLAS."""
    if library is None:
        return "the one in MLX's wheel" if system.system() == "Linux" else "Accelerate"
    describe = getattr(ctypes.CDLL(None), "openblas_get_config", None)
    if describe is None:
        return library
    describe.restype = ctypes.c_char_p
    return describe().decode().strip()
