"""Chooses the new values of an update: they replace the old ones if they and the update are finite."""

from collections.abc import Callable

import mlx.core as mx

Keep = Callable[[mx.array, mx.array], mx.array]


class Keeper:
    """A `keep`: it keeps the old value if the new one, or the whole update, is not finite."""

    def __init__(self, finite: mx.array, store: Keep) -> None:
        """`finite`: 0-d bool, whether the update may be taken; `store`: from `rounding.storing`."""
        self._finite, self._store = finite, store
        self._sound: list[mx.array] = []

    def __call__(self, new: mx.array, old: mx.array) -> mx.array:
        """The new value in the old one's dtype, or the old one."""
        stored = self._store(new, old)
        self._sound.append(self._finite & all_finite(stored))
        return mx.where(self._sound[-1], stored, old)

    def skipped(self) -> mx.array:
        """0-d bool: whether any value stayed as it was."""
        return mx.logical_not(mx.stack([self._finite, *self._sound]).all())


def all_finite(x: mx.array) -> mx.array:
    """0-d bool: whether all numbers are finite."""
    # A sum that contains an infinity or a NaN is not finite, and a sum is faster than testing each number.
    # Only in float32: in 16 bits a sum of finite numbers can overflow.
    return mx.isfinite(sum_of(x)) if x.dtype == mx.float32 else mx.isfinite(x).all()


def sum_of(x: mx.array) -> mx.array:
    """The sum of all numbers, by columns first, because a CPU sums several columns at a time."""
    return x.sum(axis=0).sum() if x.ndim > 1 else x.sum()
