"""Ranks as threads of this process: collectives that meet at a barrier, for properties of reductions."""

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from grpo_fn.trees import materialize
from runners.ranks.ranks import Ranks
from tests.support.processes.waiting import HANGS


class ThreadRanks:
    """`grpo_fn.learner.Collectives` of one of N threads. Sums are taken in the order of the ranks."""

    def __init__(self, rank: int, barrier: threading.Barrier, places: list[Any]) -> None:
        self._rank, self._barrier, self._places = rank, barrier, places
        self.calls: list[tuple[str, int]] = []  # name and elements of each collective

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._barrier.parties

    def all_sum(self, x: mx.array) -> mx.array:
        return mx.array(sum(self._exchange("all_sum", x)[1:], start=self._latest[0]))

    def all_gather(self, x: mx.array) -> mx.array:
        return mx.array(np.concatenate(self._exchange("all_gather", x)))

    def _exchange(self, name: str, x: mx.array) -> list[np.ndarray]:
        self.calls.append((name, x.size))
        self._places[self._rank] = np.array(x)
        self._barrier.wait(HANGS)
        self._latest = list(self._places)
        self._barrier.wait(HANGS)
        return self._latest


def on_ranks(number: int, act: Callable[[ThreadRanks], Any]) -> list[Any]:
    """The results of `act` on each of this many ranks; raises the first error."""
    barrier, places = threading.Barrier(number), [None] * number
    results: list[Any] = [None] * number
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = act(ThreadRanks(rank, barrier, places))
            materialize(results[rank])  # another thread cannot: streams belong to threads
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def as_run_ranks(collectives: ThreadRanks) -> Ranks:
    """`Ranks` of this thread, as if a launcher had started it; they meet at the barrier."""
    ranks = Ranks()
    ranks.number, ranks.count = collectives.rank(), collectives.size()
    ranks.hosts = ["here"] * ranks.count
    ranks._collectives = collectives
    return ranks
