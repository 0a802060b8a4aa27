"""Facts besides the inputs that the last bits of a result depend on: backend, BLAS, its threads, MLX."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from typing import Any

from runners.machine.startup import Platform

_THREADS = ("openblas_get_num_threads", "MKL_Get_Max_Threads")
_TEXTS = {"openblas_get_corename": "blas_kernels", "openblas_get_config": "blas_build"}


def arithmetic_facts(platform: Platform) -> dict[str, Any]:
    """Names and numbers that are equal on machines where the same computation gives the same bits."""
    found = {"mlx": version("mlx"), "backend": platform.backend, "device": platform.device}
    return found | ({"blas": platform.blas, **_blas()} if platform.backend == "cpu" else {})


def _blas() -> dict[str, Any]:
    """The thread count of the loaded BLAS, and the processor that its kernels are for."""
    try:
        program = ctypes.CDLL(None)  # with the libraries that were made global
    except OSError:
        return {}
    found: dict[str, Any] = {}
    for name in _THREADS:
        if hasattr(program, name):
            found["blas_threads"] = getattr(program, name)()
    for name, key in _TEXTS.items():
        if hasattr(program, name):
            function = getattr(program, name)
            function.restype = ctypes.c_char_p
            found[key] = (function() or b"").decode(errors="replace")
    return found
