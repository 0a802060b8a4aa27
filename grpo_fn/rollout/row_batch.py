"""Rows that are decoded together."""

import attrs
import mlx.core as mx

from grpo_fn.rollout.decode_step import Steps


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
