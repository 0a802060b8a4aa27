"""Rows that are decoded together, and their steps: a token of each row goes in, the logits after it come out.

`CacheSteps` call the unchanged model, over any caches. A backend may have a compiled program for steps over
one copy of each prompt.
"""

from collections.abc import Callable
from typing import Protocol

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.kv_caches import Caches


class Steps(Protocol):
    """The decoding steps of one batch of rows."""

    drops_rows: bool  # whether `keep_rows` may be called

    def __call__(self, token_b: mx.array) -> mx.array:
        """Feed each row its token: logits [B,V] of the next."""
        ...

    def keep_rows(self, rows: list[int]) -> None:
        """Keep these rows, in rising order."""


class CacheSteps:
    """Steps of a model over caches."""

    drops_rows = True

    def __init__(
        self,
        model: nn.Module,
        caches: Caches,
        keep: Callable[[Caches, list[int]], None] = cache_rows.keep_rows,
    ) -> None:
        self._model, self.caches, self._keep = model, caches, keep

    def __call__(self, token_b: mx.array) -> mx.array:
        return self._model(token_b[:, None], cache=self.caches)[:, -1]

    def keep_rows(self, rows: list[int]) -> None:
        self._keep(self.caches, rows)


@attrs.define(eq=False)
class RowBatch:
    """Rows that take their decoding steps together, and their state."""

    steps: Steps
    logits_bv: mx.array  # of the next token
    bits_nbw: mx.array  # the random bits of each draw
    rows: list[int]  # numbers of its rows in the whole
    seen_bv: mx.array | None = None  # the tokens that each row has had, if repeating them is penalized
    drawn: list[dict[str, mx.array]] = attrs.field(init=False, factory=list)  # since the last check
    alive: set[int] = attrs.field(init=False)  # of `rows`, those that have not ended
    count: int = attrs.field(init=False, default=0)  # tokens drawn of each row

    def __attrs_post_init__(self) -> None:
        self.alive = set(self.rows)

    @property
    def is_full(self) -> bool:
        """Whether all rows have reached the length limit."""
        return self.count == self.bits_nbw.shape[0]

    def keep_rows(self, places: list[int]) -> None:
        """Keep only the rows at these places."""
        self.steps.keep_rows(places)
        index = mx.array(places)
        self.bits_nbw, self.rows = self.bits_nbw[:, index], [self.rows[i] for i in places]
        self.seen_bv = None if self.seen_bv is None else self.seen_bv[index]
