"""Keeping freed memory in the process, where MLX computes on a Linux CPU.

MLX's CPU backend takes every array from malloc and gives it back when done. glibc hands large blocks back to
the system at once, so that each new array is filled page by page, a fault each, which takes several times as
long as writing it. With the settings below freed blocks stay and are used again. What it costs: the process
keeps its peak of memory to its end.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h
_NEVER = 2**31 - 1
_TUNED_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed; returns whether it does.

    False on other systems and other C libraries, and where the environment tunes malloc already.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _TUNED_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all([mallopt(name, value) == 1 for name, value in settings])
