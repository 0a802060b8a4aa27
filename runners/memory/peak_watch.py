"""Memory during a run: MLX's figures, the system's swap, and one warning before it is full."""

from __future__ import annotations

from runners.errors import gigabytes
from runners.machine.memory_readings import read_memory, swap_used

FULL = 0.9  # of the memory


class MemoryWatch:
    """Reads the memory for each log line, and warns once when the peak exceeds 90 % of the total."""

    def __init__(self, limit_gb: float, key: str) -> None:
        """`limit_gb` is system.memory_limit_gb, 0 for the machine's memory; `key` lowers the peak."""
        self._limit, self.key = limit_gb * 1e9, key
        self._warned = False

    def read(self) -> tuple[dict[str, float], str | None]:
        """The current metrics, and the warning at the first reading above the limit."""
        found, swap = read_memory(), swap_used()
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
            f"{gigabytes(int(total))}{limit}; lower {self.key}"
        )
