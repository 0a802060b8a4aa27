"""Batch sizes for decoding that shrink by halves: every size is a compiled program of its own."""

from collections.abc import Sequence


def halved(number: int, least: int) -> int:
    """The number, halved and rounded up as often as the result is not below `least`."""
    while (number + 1) // 2 >= least and number > 1:
        number = (number + 1) // 2
    return number


def filled(chosen: Sequence[int], count: int, number: int) -> list[int]:
    """`count` of the first `number` integers in rising order: those chosen, then the first of the others."""
    taken = set(chosen)
    return sorted([*chosen, *[n for n in range(number) if n not in taken][: count - len(chosen)]])
