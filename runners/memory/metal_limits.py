"""Sets MLX's limits on Metal during a run: how much memory stays resident, and how much freed
memory MLX keeps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from runners.errors import gigabytes
from runners.machine.memory_readings import resident_limit, total_memory
from runners.memory.forecast import Phase

_MARGIN = 1.1  # factor on the predicted peak
_MOST = 0.9  # share of the machine's memory that macOS may be asked to leave to the GPU
_LEAST_CACHE = 2**29  # bytes of freed memory that MLX always keeps


@contextmanager
def metal_limits(
    backend: str, phases: Mapping[str, Phase], note: Callable[[str], None]
) -> Iterator[None]:
    """Keeps the run's peak memory resident during the block, as far as macOS allows. `note`
    receives a message if macOS allows less. On other backends than Metal, nothing changes.

    Without a forecast, all allowed memory stays resident. Both of MLX's limits are restored
    afterwards.
    """
    if backend != "metal":
        yield
        return
    allowed = resident_limit()
    needed = int(_MARGIN * max(map(sum, phases.values()), default=0)) or allowed
    if needed > allowed:
        line = (
            f"macOS lets the GPU keep {gigabytes(allowed)} in memory, and the run is expected to "
            f"need {gigabytes(needed)}: it becomes slow once macOS swaps"
        )
        if needed <= _MOST * total_memory():
            command = f"sudo sysctl iogpu.wired_limit_mb={-(-needed // 2**20)}"
            line += f"; until the next restart, `{command}` allows as much"
        note(line)
    resident = mx.set_wired_limit(min(needed, allowed))
    cache = mx.set_cache_limit(mx.get_memory_limit())
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_cache_limit(cache)
        mx.set_wired_limit(resident)


def keep_cache_of(phase: Phase | None) -> None:
    """Limits the freed memory that MLX keeps on Metal to the amount that this phase reuses."""
    if phase is not None and mx.metal.is_available():
        mx.set_cache_limit(max(round(phase.activations + phase.cache), _LEAST_CACHE))
