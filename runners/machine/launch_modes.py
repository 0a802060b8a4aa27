"""How decoding steps are launched: the values of `rollout.launch` as keywords of `Decoding`.

eval     wait for each step
async    submit it and prepare the next
"""

from __future__ import annotations

from typing import Any

from runners.machine.startup import Platform


def usual_launch(platform: Platform) -> str:
    """The meaning of "auto": a CPU has no launch time to hide, and pipelining copies the caches."""
    return "eval" if platform.backend == "cpu" else "async"


def launch_keywords(launch: str) -> dict[str, Any]:
    """The keywords of `Decoding`."""
    return {"pipelined": launch == "async"}
