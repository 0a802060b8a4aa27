"""Loads a BLAS for MLX's products on a Linux CPU; this is the only side effect of `import grpo_fn`.

The reference BLAS in MLX's CPU wheel is about 30 times slower than OpenBLAS or MKL, and rounds
differently. Another library replaces the reference BLAS only if its symbols are global before MLX
is imported.
"""

import ctypes
import glob
import importlib.metadata
import os
import sys
import warnings
from itertools import chain
from pathlib import Path

import attrs

# In order of preference; LP64 builds only. Fedora names the threaded builds libopenblasp/o.
_LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
_LIBRARIES += ("libmkl_rt.so.2", "libmkl_rt.so.1", "libmkl_rt.so")
_CUDA_WHEELS = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
_VARIABLE = "GRPO_FN_BLAS"
_KERNELS_VARIABLE = "OPENBLAS_CORETYPE"
# The kernels that OpenBLAS chooses for an unknown x86 processor: without AVX, about six times
# slower.
_FALLBACK = b"Prescott"
# Kernels for older processors, and the features that they require; the fastest first.
_KERNELS = (
    ("SkylakeX", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("Haswell", {"avx2", "fma"}),
)
TOO_LATE = "mlx was imported before grpo_fn: import grpo_fn first"
_AS_IT_IS = "matrix products are about 30 times slower now, and round differently from grpo-run"


@attrs.frozen
class Blas:
    """The outcome of the search for a BLAS: the loaded library, or the reason why none was
    loaded.
    """

    library: str | None
    reason: str = ""


_found: list[Blas] = globals().setdefault("_found", [])  # kept by importlib.reload


def load_blas() -> Blas:
    """Loads a fast BLAS globally, once per process. The environment variable GRPO_FN_BLAS can name
    a BLAS; with "none", no BLAS is loaded.

    The function loads nothing on macOS, with a CUDA build of MLX, or (with a warning) if MLX has
    already been imported.

    Raises ImportError if GRPO_FN_BLAS names something that is not a BLAS.
    """
    if not _found:
        _found.append(_search())
        if _found[0].reason == TOO_LATE:
            # stacklevel 5 is the line that imports grpo_fn.
            warnings.warn(f"{TOO_LATE}; {_AS_IT_IS}", RuntimeWarning, stacklevel=5)
    return _found[0]


def _search() -> Blas:
    wish = os.environ.get(_VARIABLE, "")
    if sys.platform != "linux":
        return Blas(None, "this platform has its own BLAS")
    if _installed(*_CUDA_WHEELS):
        return Blas(None, "MLX computes on the GPU")
    loaded = _global_blas()
    if loaded:
        return Blas(loaded)
    if wish.lower() == "none":
        return Blas(None, f"{_VARIABLE}=none")
    if "mlx.core" in sys.modules:
        return Blas(None, TOO_LATE)
    for name in (wish,) if wish else _candidates():
        if _load_global(name):
            return Blas(name)
    if wish:
        wanted = "a library with 32-bit cblas_sgemm that can be loaded, or none"
        raise ImportError(f"{_VARIABLE}={wish}: expected {wanted}", name=_VARIABLE)
    return Blas(None, "no OpenBLAS or MKL was found")


def _installed(*distributions: str) -> bool:
    return any(any(importlib.metadata.distributions(name=name)) for name in distributions)


def _candidates() -> list[str]:
    folders = (
        Path(sys.prefix) / "lib",
        Path(sys.base_prefix) / "lib",
        Path.home() / ".local" / "lib",
    )
    private = [sorted(glob.glob(f"{folder}/libmkl_rt.so*")) for folder in folders]
    return [*_LIBRARIES, *dict.fromkeys(chain.from_iterable(private))]


def _load_global(name: str) -> bool:
    try:
        library = ctypes.CDLL(name)  # local first: an unsuitable library must not become global
    except OSError:
        return False
    if not hasattr(library, "cblas_sgemm") or _is_ilp64(library):
        return False
    _choose_kernels(library)
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return True


def _choose_kernels(library: ctypes.CDLL) -> None:
    """Selects the fastest usable kernels in an OpenBLAS that is older than the processor.

    A user's choice in OPENBLAS_CORETYPE is kept. OpenBLAS reads this variable when it selects
    kernels. The function makes OpenBLAS select again; other libraries do not see the variable.
    """
    needed = ("openblas_get_corename", "gotoblas_dynamic_quit", "gotoblas_dynamic_init")
    if _KERNELS_VARIABLE in os.environ or not all(hasattr(library, name) for name in needed):
        return
    library.openblas_get_corename.restype = ctypes.c_char_p
    if library.openblas_get_corename() != _FALLBACK:
        return
    flags = processor_flags()
    kernels = next((name for name, wanted in _KERNELS if wanted <= flags), None)
    if kernels is None:  # the processor has no AVX
        return
    os.environ[_KERNELS_VARIABLE] = kernels
    library.gotoblas_dynamic_quit()
    library.gotoblas_dynamic_init()
    del os.environ[_KERNELS_VARIABLE]


def processor_flags() -> set[str]:
    """Returns the processor's features as reported by Linux, or an empty set on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _is_ilp64(library: ctypes.CDLL) -> bool:
    # If functions without a suffix take 64-bit integers, MLX would pass wrong sizes.
    if os.environ.get("MKL_INTERFACE_LAYER", "").upper().startswith("ILP64"):
        return hasattr(library, "MKL_Get_Max_Threads")
    if not hasattr(library, "openblas_get_config"):
        return False
    library.openblas_get_config.restype = ctypes.c_char_p
    return b"USE64BITINT" in library.openblas_get_config()


def _global_blas() -> str | None:
    """Returns "already loaded" if a BLAS is already global, for example through LD_PRELOAD;
    otherwise None. Private copies, such as NumPy's, do not count.
    """
    try:
        program = ctypes.CDLL(None)
    except OSError:
        return None
    return "already loaded" if hasattr(program, "cblas_sgemm") else None
