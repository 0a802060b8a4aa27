"""How decoding steps are launched: what the names that `rollout.launch` takes mean to `Decoding`.

eval     wait for each step
async    hand it over and prepare the next
"""

from __future__ import annotations

from typing import Any

from runners.machine.startup import Platform


def usual_launch(platform: Platform) -> str:
    """What "auto" is: a CPU has no launch to hide, and pipelining copies the caches."""
    return "eval" if platform.backend == "cpu" else "async"


def launch_keywords(launch: str) -> dict[str, Any]:
    """The keywords of `Decoding`."""
    return {"pipelined": launch == "async"}
