"""Memory while a run goes: MLX's own figures, the system's swap, and one warning before it is full."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from runners.machine import startup
from runners.telemetry.progress import gigabytes

FULL = 0.9  # of the memory
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class MemoryWatch:
    """Reads the memory for each log line, and warns once when the peak passes 90 % of what there is."""

    def __init__(self, limit_gb: float, key: str) -> None:
        """`limit_gb` is system.memory_limit_gb, 0 for the machine's memory; `key` lowers the peak."""
        self._limit, self._key = limit_gb * 1e9, key
        self._warned = False

    def read(self) -> tuple[dict[str, float], str | None]:
        """The metrics of now, and the warning at the first reading past the mark."""
        found, swap = startup.memory(), swap_used()
        metrics = {"memory/active_gb": found.active / 1e9, "memory/peak_gb": found.peak / 1e9}
        if swap is not None:
            metrics["memory/swap_gb"] = swap / 1e9
        total = min(found.total, self._limit) if self._limit else found.total
        if self._warned or found.peak <= FULL * total:
            return metrics, None
        self._warned = True
        limit = " (system.memory_limit_gb)" if self._limit and total == self._limit else ""
        return metrics, (
            f"memory: the peak so far is {gigabytes(found.peak)}, {found.peak / total:.0%} of "
            f"{gigabytes(int(total))}{limit}; lower {self._key}"
        )


def swap_used() -> int | None:
    """Bytes of the whole system's swap in use; None where that cannot be told."""
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
