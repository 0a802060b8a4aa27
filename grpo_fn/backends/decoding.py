"""The positions of a decoding step, as one array for all layers."""

from contextvars import ContextVar

import mlx.core as mx

# (first, own, their sum) of the latest steps; a thread's own, as MLX computes its arrays on a stream of that
# thread.
_shared: ContextVar[tuple[tuple[mx.array, int, mx.array], ...]] = ContextVar("shared", default=())


def shared_positions(first_b: mx.array, own: int) -> mx.array:
    """`first_b` + `own`, positions [B], as one array for all layers of a step.

    What follows from it is computed once. Nobody may change it in place, as mlx-lm's caches do with theirs.
    """
    for first, count, position_b in _shared.get():
        if first is first_b and count == own:
            return position_b
    position_b = first_b + own
    _shared.set((*_shared.get()[-3:], (first_b, own, position_b)))
    return position_b


def are_shared(position: object) -> bool:
    """Whether `shared_positions` gave this very array, a short time ago."""
    return any(each is position for _, _, each in _shared.get())
