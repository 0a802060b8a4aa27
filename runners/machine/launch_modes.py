"""How decoding steps are launched: what the names that `rollout.launch` takes mean to `Decoding`.

eval     wait for each step
async    hand it over and prepare the next
split    two halves of the rows side by side, a core each: on a CPU
"""

from __future__ import annotations

from typing import Any

from runners.machine.startup import Platform

LANES = 2
# With more cores a BLAS has more of them for a step's products, and the halves only two: then it is measured.
MOST_CORES = 4


def launch_modes(platform: Platform) -> tuple[str, ...]:
    """Those that may pay on this machine; the usual one first."""
    if platform.backend != "cpu":
        return "async", "eval"
    if platform.cores < LANES:
        return "eval", "async"
    return ("split", "eval", "async") if platform.cores <= MOST_CORES else ("eval", "split", "async")


def usual_launch_keywords(platform: Platform) -> dict[str, Any]:
    """The keywords of `Decoding` where nothing has been measured."""
    return launch_keywords(launch_modes(platform)[0])


def launch_keywords(launch: str) -> dict[str, Any]:
    """The keywords of `Decoding`."""
    return {"pipelined": launch == "async", "lanes": LANES if launch == "split" else 1}
