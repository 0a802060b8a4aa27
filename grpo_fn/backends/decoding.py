"""Helpers of decoding steps: a cache for one token per call, positions, and batches that shrink by halves."""

from collections.abc import Sequence
from contextvars import ContextVar

import mlx.core as mx

# Of the latest steps; a thread's own, as MLX computes its arrays on a stream of that thread.
_shared: ContextVar[tuple[mx.array, ...]] = ContextVar("shared", default=())


def share_positions(position_b: mx.array) -> mx.array:
    """The positions [B], as the same for all layers of a step: what follows from them is computed once.

    Nobody may change the array in place, as mlx-lm's caches do with theirs.
    """
    _shared.set((*_shared.get()[-3:], position_b))
    return position_b


def are_shared(position: object) -> bool:
    """Whether `share_positions` gave this very array, a short time ago."""
    return any(each is position for each in _shared.get())


class OneTokenCache:
    """A cache that takes one new token per row and call."""

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: a new token sees all earlier ones."""
        if length != 1 or window_size is not None:
            raise ValueError(f"length = {length}, window_size = {window_size}: wanted 1 and no window")


def halve_down_to(least: int, number: int) -> int:
    """The number, halved and rounded up as long as the result is not below `least`."""
    while (number + 1) // 2 >= least and number > 1:
        number = (number + 1) // 2
    return number


def with_others(chosen: Sequence[int], count: int, number: int) -> list[int]:
    """`count` of the integers below `number`, rising: the chosen ones, then the first of the others."""
    taken = set(chosen)
    return sorted([*chosen, *[n for n in range(number) if n not in taken][: count - len(chosen)]])
