"""Layers that take the same input, computed as one product."""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

# Names of sibling layers that take the same input, in the models of mlx-lm.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("c_q", "c_k", "c_v"), ("gate_proj", "up_proj"))


class SharedInput(nn.Module):
    """Products of one input: holds the last input, and the results that were not used yet."""

    def __init__(self) -> None:
        super().__init__()
        self._input: mx.array | None = None
        self._results: dict[int, mx.array] = {}

    def products(self, x: mx.array) -> Iterator[mx.array]:
        """All results, in order."""
        raise NotImplementedError

    def take(self, number: int, x: mx.array) -> mx.array:
        """One of the results; all are computed when the first is needed."""
        if self._input is not x or number not in self._results:
            self._input, self._results = x, dict(enumerate(self.products(x)))
        result = self._results.pop(number)
        if not self._results:  # no tracer outlives its trace
            self._input = None
        return result
