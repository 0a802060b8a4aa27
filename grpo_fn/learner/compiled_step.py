"""Compiles the learner's steps: with fused kernels, or with their operations unchanged."""

from collections.abc import Callable
from typing import Any

from grpo_fn.backends import number
from grpo_fn.compile import Compiled, compiled


def compiled_step(function: Callable[..., Any], *, enabled: bool) -> Compiled:
    """Compile a step. On CUDA nothing is fused: a gradient's eighty kernels would take minutes to compile,
    and a compiled step mainly saves the Python that describes it."""
    return compiled(function, enabled=enabled, fuse=bool(number("fuses_learner")))
