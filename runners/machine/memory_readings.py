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

from runners.machine.process_limits import memory_limit

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


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
    total = int(info.get("memory_size", 0) or info.get("total_memory", 0)) or _total_ram()
    return MemoryReading(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), total)


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
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        free.append(next(available, total) + now.cache)
    return max(min(free), 0)


def usable_memory(memory_limit_gb: float = 0.0) -> int:
    """Bytes that this process may use: on a GPU what it holds plus what others leave; on a CPU all memory.

    Free memory on a CPU is no measure: it changes every second, and the system frees its caches on demand.
    """
    import mlx.core as mx

    now = read_memory()
    if mx.default_device().type == mx.DeviceType.cpu:
        return now.total
    return min(now.total, now.active + free_memory(memory_limit_gb))


def swap_used() -> int | None:
    """Bytes of the whole system's swap in use; None if unknown."""
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "vm.swapusage"], capture_output=True, text=True, check=False)
        return parse_swapusage(done.stdout)
    file = Path("/proc/meminfo")
    return parse_meminfo(file.read_text()) if file.is_file() else None


def parse_meminfo(text: str) -> int | None:
    """Bytes of swap in use from Linux's /proc/meminfo."""
    fields = dict(re.findall(r"^(Swap\w+):\s+(\d+) kB$", text, re.MULTILINE))
    if not {"SwapTotal", "SwapFree"} <= fields.keys():
        return None
    return 1024 * (int(fields["SwapTotal"]) - int(fields["SwapFree"]))


def parse_swapusage(text: str) -> int | None:
    """Bytes of swap in use from macOS's `sysctl vm.swapusage`, such as `total = 2.00G  used = 61.5M  …`."""
    found = re.search(r"used = ([\d.,]+)([KMG])", text)
    return round(float(found[1].replace(",", ".")) * _UNITS[found[2]]) if found else None


def _total_ram() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)
