"""The second half of a gated MLP, down(silu(gate) · x); for the backward pass only gate and x are saved.

The gradient of down's weights also needs the gated product. That is a sixth of a block's saved activations,
and one pass over two arrays recomputes it.
"""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled
from grpo_fn.backends.composed import swiglu, swiglu_gradient
from grpo_fn.backends.recomputing import recomputed
from grpo_fn.layers import is_one_token, parameters_replaced
from grpo_fn.trees import from_names, named_leaves


def down_of_gated(down: nn.Module, gate: mx.array, x: mx.array) -> mx.array:
    """down(silu(gate) · x), [...,F] to [...,D]; `down` is any layer, with adapters or without."""
    if is_one_token(gate) or _is_random(down) or not enabled("recomputed_gates"):
        return down(swiglu(gate, x))
    held, names = down.parameters(), list(named_leaves(down.trainable_parameters()))

    def call(gated: mx.array, *leaves: mx.array) -> mx.array:
        # The backward pass runs this again, long after the call: the module may then hold other leaves.
        with parameters_replaced(down, held, from_names(dict(zip(names, leaves, strict=True)))):
            return down(gated)

    @mx.custom_function
    def whole(gate: mx.array, x: mx.array, *leaves: mx.array) -> mx.array:
        return call(swiglu(gate, x), *leaves)

    @whole.vjp
    def gradient(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        gate, x, *leaves = primals
        gated, swiglu_vjp = swiglu_gradient(*recomputed([gate, x], cotangent))
        gated_gradient, *leaf_gradients = mx.vjp(call, [gated, *leaves], [cotangent])[1]
        return (*swiglu_vjp(gated_gradient), *leaf_gradients)

    trained = named_leaves(down.trainable_parameters())
    return cast(mx.array, whole(gate, x, *trained.values()))


def _is_random(layer: nn.Module) -> bool:
    """Whether a second call would give another result."""
    return any(isinstance(part, nn.Dropout) and part._p_1 < 1 for part in layer.modules())
