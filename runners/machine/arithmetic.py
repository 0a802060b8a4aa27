"""Facts besides the inputs that the last bits of a result depend on."""

from __future__ import annotations

import platform as python_platform
from importlib.metadata import version
from typing import Any

from runners.machine.startup import Platform


def arithmetic_facts(platform: Platform) -> dict[str, Any]:
    """Names and numbers that are equal on machines where the same computation gives the same bits."""
    found = {"mlx": version("mlx"), "backend": platform.backend, "device": platform.device}
    if platform.backend != "cpu":
        return found
    return found | {
        "blas": platform.blas,
        "cores": platform.cores,
        "processor": python_platform.processor() or python_platform.machine(),
    }
