"""The machine a run finds itself on: its BLAS, its MLX backend, its memory.

Importing this module imports nothing heavy, so that `load_blas` can run before `mlx.core` does: the reference
BLAS inside MLX's Linux CPU wheel is some thirty times slower than OpenBLAS or MKL, and only a library whose
symbols are global *before* MLX is loaded takes its place.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import attrs

from runners import install_hints
from runners.errors import UserError
from runners.malloc import keep_freed_memory

# In order of preference; LP64 builds only. Fedora names the threaded builds libopenblasp/o.
_LIBRARIES = (
    "libopenblas.so.0",
    "libopenblasp.so.0",
    "libopenblaso.so.0",
    "libopenblas.so",
    "libmkl_rt.so.2",
    "libmkl_rt.so.1",
    "libmkl_rt.so",
)
_CUDA_WHEELS = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
# MLX hands operations to a CUDA device in buffers of up to a hundred, ten at most ahead of it; what they will
# write is held from then on. Shorter ones hold a fifth less, and a rollout's are launched sooner.
_CUDA_BUFFERS = ("MLX_MAX_OPS_PER_BUFFER", "20")


@attrs.frozen
class Blas:
    """The outcome of the search for a BLAS: the library that is loaded, or why there is none."""

    library: str | None
    reason: str = ""


@attrs.frozen
class Memory:
    """Bytes: MLX's active arrays, their peak, MLX's cache, and all that the machine (or its GPU) has."""

    active: int
    peak: int
    cache: int
    total: int


@attrs.frozen
class Platform:
    """What a run computes on. `notices` are lines worth showing once, most important first."""

    backend: str  # "metal" | "cuda" | "cpu"
    blas: str | None = None
    device: str = ""
    cores: int = 1  # that this process may use
    notices: tuple[str, ...] = ()

    @property
    def default_dtype(self) -> str | None:
        """The compute dtype where the config says "auto": "float32" on CPU, None (the model's own) elsewhere.

        On CPU a bf16 matmul goes round the BLAS and is an order of magnitude slower than float32.
        """
        return "float32" if self.backend == "cpu" else None


def load_blas() -> str | None:
    """Makes a fast BLAS global, and sets up a CUDA build of MLX: before `mlx.core` is first imported.

    Returns the library that is in force, None where there is none (`blas()` says why). Calling it again, on
    macOS, with a CUDA build of MLX or after `mlx.core` was imported changes nothing.
    """
    _shorten_buffers()
    return blas().library


def _shorten_buffers() -> None:
    """Of a CUDA build of MLX, which reads the setting at its first operation; the user's own stays."""
    if sys.platform == "linux" and _installed(*_CUDA_WHEELS):
        os.environ.setdefault(*_CUDA_BUFFERS)


@functools.cache
def blas() -> Blas:
    """The search behind `load_blas`, done once per process; the environment's GRPO_FN_BLAS names a library
    to use instead, or "none"."""
    wish = os.environ.get("GRPO_FN_BLAS", "")
    if sys.platform != "linux":
        return Blas(None, "this platform brings its own BLAS")
    if _installed(*_CUDA_WHEELS):
        return Blas(None, "MLX computes on the GPU")
    loaded = _mapped_blas()
    if loaded:
        return Blas(loaded)
    if "mlx.core" in sys.modules:
        return Blas(None, "mlx.core was imported before a BLAS could be loaded: call load_blas() first")
    if wish.lower() == "none":
        return Blas(None, "GRPO_FN_BLAS=none")
    for name in (wish,) if wish else _candidates():
        if _load_global(name):
            return Blas(name)
    if wish:
        raise UserError(f"GRPO_FN_BLAS={wish}: this is no library with 32-bit cblas_sgemm that can be loaded")
    return Blas(None, "no OpenBLAS or MKL was found")


def prepare(memory_limit_gb: float = 0.0) -> Platform:
    """Loads the BLAS, imports MLX, finds its backend and sets its memory limit (10^9 bytes; 0 leaves it).

    On a CPU memory that is freed stays in the process: see `malloc`.

    Raises UserError where MLX is not installed, or is installed without a backend.
    """
    load_blas()
    found = blas()
    try:
        import mlx.core as mx
    except ImportError as error:
        raise UserError(_explain_import(error)) from error
    if memory_limit_gb > 0:
        mx.set_memory_limit(int(memory_limit_gb * 1e9))
    backend = _backend(mx)
    if backend == "cpu":
        keep_freed_memory()
    notices = _cpu_notices(found) if backend == "cpu" and sys.platform == "linux" else ()
    device = str(mx.device_info().get("device_name", "")) or backend
    return Platform(backend=backend, blas=found.library, device=device, cores=_cores(), notices=notices)


def memory() -> Memory:
    """The memory readings of this moment; `mx.reset_peak_memory` starts a new peak."""
    import mlx.core as mx

    info = mx.device_info()
    total = int(info.get("memory_size", 0) or info.get("total_memory", 0)) or _total_ram()
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), total)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _backend(mx) -> str:
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _cpu_notices(found: Blas) -> tuple[str, ...]:
    notices = []
    if found.library is None and found.reason != "GRPO_FN_BLAS=none":
        install = install_hints.blas()
        if "imported" in found.reason:
            notices.append(f"matrix products are slow: {found.reason}")
        else:
            notices.append(
                f"matrix products are some 30x slower than they could be: {found.reason}; `{install}`"
            )
    if shutil.which("g++") is None:
        install = install_hints.compiler()
        notices.append(f"g++ is not installed, so compiled steps run uncompiled; `{install}`")
    return tuple(notices)


def _explain_import(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"MLX is not installed ({error}): {install_hints.mlx()}"
    if "libmlx" in str(error):
        return f"MLX is installed without a backend ({error}): {install_hints.mlx()}"
    return f"MLX cannot be imported: {error}"


def _installed(*distributions: str) -> bool:
    for name in distributions:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _candidates() -> list[str]:
    folders = (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib", Path.home() / ".local" / "lib")
    private = [path for folder in folders for path in sorted(glob.glob(f"{folder}/libmkl_rt.so*"))]
    return [*_LIBRARIES, *dict.fromkeys(private)]


def _load_global(name: str) -> bool:
    try:
        library = ctypes.CDLL(name)  # local first: a library that will not do must not become global
    except OSError:
        return False
    if not hasattr(library, "cblas_sgemm") or _is_ilp64(library):
        return False
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return True


def _is_ilp64(library: ctypes.CDLL) -> bool:
    # With 64-bit integers under unsuffixed names MLX would pass garbage sizes.
    if os.environ.get("MKL_INTERFACE_LAYER", "").upper().startswith("ILP64"):
        return hasattr(library, "MKL_Get_Max_Threads")
    if not hasattr(library, "openblas_get_config"):
        return False
    library.openblas_get_config.restype = ctypes.c_char_p
    return b"USE64BITINT" in library.openblas_get_config()


def _mapped_blas() -> str | None:
    """A BLAS that is global already, as by LD_PRELOAD; private copies, such as NumPy's, do not count."""
    try:
        program = ctypes.CDLL(None)
    except OSError:
        return None
    return "already loaded" if hasattr(program, "cblas_sgemm") else None


def _total_ram() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup = Path("/sys/fs/cgroup/memory.max")
    text = cgroup.read_text().strip() if cgroup.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical
