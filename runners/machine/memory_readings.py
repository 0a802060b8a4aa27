"""Current memory: MLX's, what is free for it, and the system's swap.

Only the functions import MLX, not this module.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import attrs

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_MEMINFO = Path("/proc/meminfo")


@attrs.frozen
class MemoryReading:
    """Bytes: MLX's active arrays, their peak, MLX's cache, and the total of the machine (or its GPU)."""

    active: int
    peak: int
    cache: int
    total: int


def read_memory() -> MemoryReading:
    """The memory in use now; `mx.reset_peak_memory` starts a new peak."""
    import mlx.core as mx

    info = mx.device_info()
    total = int(info.get("memory_size", 0) or info.get("total_memory", 0))
    if not total:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = min(physical, memory_limit() or physical)
    return MemoryReading(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), total)


def memory_metrics() -> dict[str, float]:
    """MLX's memory and the system's swap, as the log names them."""
    found, swap = read_memory(), swap_used()
    metrics = {"memory/active_gb": found.active / 1e9, "memory/peak_gb": found.peak / 1e9}
    return metrics if swap is None else metrics | {"memory/swap_gb": swap / 1e9}


def free_memory(memory_limit_gb: float = 0.0) -> int:
    """Bytes that new arrays can take, within MLX's limit and what other programs leave (CUDA, Linux)."""
    import mlx.core as mx

    now, info = read_memory(), mx.device_info()
    total = min(now.total, int(info.get("max_recommended_working_set_size", 0)) or now.total)
    free = [total - now.active]
    if memory_limit_gb > 0:
        free.append(int(memory_limit_gb * 1e9) - now.active)
    # MLX's own cache counts as used there, but new arrays can use it.
    if "free_memory" in info:
        free.append(int(info["free_memory"]) + now.cache)
    elif sys.platform == "linux":
        free.append(_meminfo().get("MemAvailable", total) + now.cache)
    return max(min(free), 0)


def usable_memory(memory_limit_gb: float = 0.0) -> int:
    """Bytes that this process may use: on a GPU what it holds plus what others leave; on a CPU all memory; no
    more than the limit.

    Free memory on a CPU is no measure: it changes every second, and the system frees its caches on demand.
    """
    import mlx.core as mx

    now = read_memory()
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    found = now.total if is_cpu else min(now.total, now.active + free_memory(memory_limit_gb))
    return min(found, int(memory_limit_gb * 1e9) or found)


def swap_used() -> int | None:
    """Bytes of the whole system's swap in use; None if unknown."""
    if sys.platform == "darwin":  # total = 2.00G  used = 61.5M  …
        done = subprocess.run(["sysctl", "-n", "vm.swapusage"], capture_output=True, text=True, check=False)
        found = re.search(r"used = ([\d.,]+)([KMG])", done.stdout)
        return round(float(found[1].replace(",", ".")) * _UNITS[found[2]]) if found else None
    sizes = _meminfo()
    return sizes["SwapTotal"] - sizes["SwapFree"] if {"SwapTotal", "SwapFree"} <= sizes.keys() else None


def memory_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least bytes that the control groups of this process allow; None: no limit.

    Those of version 2, and the one of version 1 that a container shows as its root.
    """
    names = re.findall("^0::(.*)$", own.read_text(encoding="utf-8"), re.MULTILINE) if own.is_file() else []
    places = [root / os.path.normpath(name).lstrip("/") for name in names or ["/"]]
    files = [folder / "memory.max" for place in places for folder in (place, *place.parents)]
    files = [file for file in files if file.is_relative_to(root)]
    files.append(root / "memory" / "memory.limit_in_bytes")
    texts = [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def _meminfo() -> dict[str, int]:
    """Linux's table of memory, in bytes; {} elsewhere."""
    text = _MEMINFO.read_text(encoding="utf-8") if _MEMINFO.is_file() else ""
    return {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
