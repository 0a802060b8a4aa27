"""With which of this machine's compiled decoding steps a model can be decoded; found by trying."""

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import find
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.decoding.unpacked_layers import unpacked_weights

BATCH_PROGRAM = "kernel_steps"  # for all rows together
LANE_PROGRAM = "grid_steps"  # for row lanes
PROGRAMS = (BATCH_PROGRAM, LANE_PROGRAM)


def programs_for(module: nn.Module, compute: mx.Dtype | None = None) -> frozenset[str]:
    """The programs that take a model which shares prefixes.

    `compute` is the dtype that it computes in; None: that of its weights.
    """
    return frozenset(name for name in PROGRAMS if takes_program(name, module, compute))


def fits_lanes(module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Whether the model is small enough for row lanes, on a machine that has them."""
    return fits(LANE_PROGRAM, module, compute)


def takes_program(name: str, module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Whether one of them takes the model."""
    program = find(name)
    return program is not None and fits(name, module, compute) and program.takes(module, plain_caches(module))


def fits(name: str, module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Whether the model is small enough for it; nothing is computed: it follows from shapes."""
    program = find(name)
    if program is None:
        return False
    with unpacked_weights(module, compute):
        return program.fits(module, compute)
