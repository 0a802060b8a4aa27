"""How to install what is missing."""

from __future__ import annotations

import sys

BLAS = "apt-get install libopenblas0-pthread (or your system's package of OpenBLAS)"
COMPILER = "apt-get install g++ (or your system's package of GCC)"
# grpo_fn is on no package index, and anyone could register its name there with any content.
_WHERE = "in a clone of grpo_fn"


def mlx() -> str:
    """MLX with a backend."""
    if sys.platform == "darwin":
        return f"pip install -e . {_WHERE}"
    return (
        f"pip install -e '.[cpu]' {_WHERE} for the CPU, '.[cuda12]' or '.[cuda13]' for an NVIDIA GPU (one of "
        "them: these wheels exclude each other)"
    )


def extra(name: str) -> str:
    """The packages of one of the extras of pyproject.toml."""
    return f"pip install -e '.[{name}]' {_WHERE}"
