"""Measures time and memory of a call: warm-up, forced evaluation, medians, and comparisons within
one run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from grpo_fn.trees import materialize

Call = Callable[[], Any]  # returns the arrays that are to be computed, as any tree


@attrs.frozen
class Timing:
    """Seconds of one call, in the order of measurement."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median sample, which is the least affected by noise on a shared machine."""
        return statistics.median(self.samples)

    def __truediv__(self, other: Timing) -> Ratio:
        """The ratio to `other`, which was measured in the same interleaved run."""
        pairs = tuple(a / b for a, b in zip(self.samples, other.samples, strict=True))
        return Ratio(self.median / other.median, pairs)


@attrs.frozen
class Ratio:
    """One timing over another."""

    of_medians: float
    pairs: tuple[float, ...]  # round by round: both calls of a round met the same load

    @property
    def paired(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.pairs)


def run_once(call: Call) -> float:
    """Seconds of one call; all of its arrays are computed before the clock is read."""
    mx.synchronize()
    started = time.perf_counter()
    materialize(call())
    mx.synchronize()
    return time.perf_counter() - started


def timed(call: Call, *, repeats: int, warmup: int = 1) -> Timing:
    """The call's timing over `repeats` samples, after `warmup` calls for tracing and compiling."""
    return interleaved({"call": call}, repeats=repeats, warmup=warmup)["call"]


def interleaved(calls: Mapping[str, Call], *, repeats: int, warmup: int = 1) -> dict[str, Timing]:
    """Timings of several calls, measured alternately so that other load on the machine affects all
    of them equally.

    Every call is timed once per round, after `warmup` calls of each. Each round starts with the
    next call, so that a call does not always follow the same neighbour.
    """
    names = list(calls)
    for _ in range(warmup):
        for name in names:
            run_once(calls[name])
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            samples[name].append(run_once(calls[name]))
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def peak_bytes(call: Call, *, warm: bool = True) -> int:
    """Bytes that a call needs at its peak in addition to the memory in use before it; its results
    count.

    `warm` runs it once before, so that tracing and persistent constants do not count.
    """
    if warm:
        run_once(call)
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run_once(call)
    return max(mx.get_peak_memory() - before, 0)


def largest_error(found: Any, wanted: Any) -> float:
    """The largest difference of two nested lists of arrays (MLX's or NumPy's), computed in float64,
    each array's relative to its own largest wanted entry.

    Raises:
        ValueError: they are nested differently, or two arrays differ in shape.
    """
    if isinstance(found, list | tuple):
        return max(largest_error(a, b) for a, b in zip(found, wanted, strict=True))
    a = np.array(found, np.float64)
    b = np.array(wanted, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"expected an array of shape {b.shape}, found {a.shape}")
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300))
