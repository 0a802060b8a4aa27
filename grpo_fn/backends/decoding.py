"""Helpers of decoding steps: a cache for one token per call, positions, and batches that shrink by halves."""

from collections.abc import Sequence
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


class OneTokenCache:
    """A cache that takes one new token per row and call."""

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: a new token sees all earlier ones."""
        if length != 1 or window_size is not None:
            raise ValueError(f"length = {length}, window_size = {window_size}: expected 1 and no window")


def halve_down_to(least: int, number: int) -> int:
    """The number, halved and rounded up as long as the result is not below `least`."""
    while (number + 1) // 2 >= least and number > 1:
        number = (number + 1) // 2
    return number


def with_others(chosen: Sequence[int], count: int, number: int) -> list[int]:
    """`count` of the integers below `number`, rising: the chosen ones, then the first of the others."""
    taken = set(chosen)
    return sorted([*chosen, *[n for n in range(number) if n not in taken][: count - len(chosen)]])
