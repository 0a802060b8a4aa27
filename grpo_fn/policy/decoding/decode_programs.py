"""Finds by trying whether a model can be decoded with this machine's compiled decoding steps."""

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import find
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.decoding.unpacked_layers import unpacked_weights

PROGRAM = "kernel_steps"


def takes_program(module: nn.Module, compute: mx.Dtype | None = None) -> bool:
    """Whether the compiled steps take the model, which shares prefixes.

    `compute` is its compute dtype; None: that of its weights.
    """
    program = find(PROGRAM)
    if program is None:
        return False
    with unpacked_weights(module, compute):
        return program.takes(module, plain_caches(module))
