"""Reads the current memory: MLX's memory, the memory available to MLX, and the system's swap.

Only the functions import MLX, not this module.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_MEMINFO = Path("/proc/meminfo")
_VERSION_1 = "memory/memory.limit_in_bytes"


def total_memory() -> int:
    """Returns the machine's or its GPU's total memory in bytes."""
    import mlx.core as mx

    info = mx.device_info()
    total = int(info.get("memory_size", 0) or info.get("total_memory", 0))
    if total:
        return total
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, memory_limit() or physical)


def resident_limit() -> int:
    """Returns the bytes that macOS lets the GPU keep resident, or 0 if MLX does not use a Mac's
    GPU.
    """
    import mlx.core as mx

    return int(mx.device_info().get("max_recommended_working_set_size", 0))


def keep_model_resident() -> None:
    """On Metal, keeps as much memory resident as macOS allows, until the process ends."""
    import mlx.core as mx

    if mx.metal.is_available():
        mx.set_wired_limit(resident_limit())


def memory_metrics() -> dict[str, float]:
    """Returns MLX's memory and the system's swap, under their names in the log."""
    import mlx.core as mx

    found = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "swap": swap_used()}
    return {f"memory/{name}_gb": size / 1e9 for name, size in found.items() if size is not None}


def free_memory(memory_limit_gb: float = 0.0) -> int:
    """Returns the bytes available for new arrays, within MLX's limit and the memory that other
    programs leave free (CUDA, Linux).
    """
    import mlx.core as mx

    info = mx.device_info()
    bounds = total_memory(), resident_limit(), 1e9 * memory_limit_gb
    free = int(min(filter(None, bounds))) - mx.get_active_memory()
    left = info.get("free_memory", _meminfo().get("MemAvailable"))
    # The system counts MLX's cache as used, but new arrays can use it.
    return max(free if left is None else min(free, int(left) + mx.get_cache_memory()), 0)


def usable_memory(memory_limit_gb: float = 0.0) -> int:
    """Returns the bytes that this process may use. On a GPU, the process may use its own memory and
    free memory; on a CPU, it may use all memory. The result is at most `memory_limit_gb` gigabytes,
    if that is not 0.

    On a CPU, free memory is not a useful measure, because it changes every second and the system
    frees its caches on demand.
    """
    import mlx.core as mx

    found = total_memory()
    if mx.default_device().type == mx.DeviceType.gpu:
        found = min(found, mx.get_active_memory() + free_memory(memory_limit_gb))
    return min(found, int(memory_limit_gb * 1e9) or found)


def swap_used() -> int | None:
    """Returns the bytes of swap that the whole system uses, or None if unknown."""
    if sys.platform == "darwin":  # total = 2.00G  used = 61.5M  …
        done = subprocess.run(
            ["sysctl", "-n", "vm.swapusage"], capture_output=True, text=True, check=False
        )
        found = re.search(r"used = ([\d.,]+)([KMG])", done.stdout)
        return round(float(found[1].replace(",", ".")) * _UNITS[found[2]]) if found else None
    sizes = _meminfo()
    known = {"SwapTotal", "SwapFree"} <= sizes.keys()
    return sizes["SwapTotal"] - sizes["SwapFree"] if known else None


def swap_limit(asked_gb: float) -> float:
    """Returns the bytes of swap that a run may add: `asked_gb` gigabytes, if that is not 0.

    Otherwise, on a Mac, a run may add half of the total memory, but at most half of the free disk
    space, which holds the swap. On other systems, the result is 0, which means no limit.
    """
    import mlx.core as mx

    if asked_gb or not mx.metal.is_available():
        return 1e9 * asked_gb
    return max(min(total_memory(), shutil.disk_usage("/").free) / 2, 1.0)


def memory_limit() -> int | None:
    """Returns the lowest memory limit among this process's control groups, or None if there is no
    limit.

    All groups of version 2 are considered, and the version-1 group that a container shows as its
    root.
    """
    root = Path("/sys/fs/cgroup")
    name = re.search("^0::/(.*)$", _text(Path("/proc/self/cgroup")), re.MULTILINE)
    place = root / (name[1] if name else "")
    files = [*(folder / "memory.max" for folder in (place, *place.parents)), root / _VERSION_1]
    texts = [_text(file).strip() for file in files]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def _meminfo() -> dict[str, int]:
    """Reads Linux's memory table, in bytes. The dict is empty on other systems."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", _text(_MEMINFO), re.MULTILINE)
    return {name: 1024 * int(size) for name, size in rows}


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
