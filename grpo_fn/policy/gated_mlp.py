"""The second half of a gated MLP, down(silu(gate) · x), of which a backward pass keeps gate and x alone.

The gradient of down's weights needs the gated product too: a sixth of all that the backward pass waits for in
a block, and one pass over two arrays to make again.
"""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cpu.elementwise import anew, is_one_token, swiglu, swiglu_with_slopes
from grpo_fn.trees import from_names, named_leaves


def down_of_gated(down: nn.Module, gate: mx.array, x: mx.array) -> mx.array:
    """down(silu(gate) · x), [...,F] to [...,D]; `down` is any layer, with adapters or without."""
    if is_one_token(gate) or _is_random(down):
        return down(swiglu(gate, x))
    held, names = down.parameters(), list(named_leaves(down.trainable_parameters()))

    def call(gated: mx.array, *leaves: mx.array) -> mx.array:
        before = down.parameters()  # the backward pass comes here again, long after the call
        try:
            down.update(held)
            down.update(from_names(dict(zip(names, leaves, strict=True))))
            return down(gated)
        finally:
            down.update(before)

    @mx.custom_function
    def whole(gate: mx.array, x: mx.array, *leaves: mx.array) -> mx.array:
        return call(swiglu(gate, x), *leaves)

    @whole.vjp
    def slopes(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        gate, x, *leaves = primals
        gated, slopes_of = swiglu_with_slopes(*anew([gate, x], cotangent))
        along = mx.vjp(call, [gated, *leaves], [cotangent])[1]
        return (*slopes_of(along[0]), *along[1:])

    trained = named_leaves(down.trainable_parameters())
    return cast(mx.array, whole(gate, x, *trained.values()))


def _is_random(layer: nn.Module) -> bool:
    """Whether a second call would give another result."""
    return any(isinstance(part, nn.Dropout) and part._p_1 < 1 for part in layer.modules())
