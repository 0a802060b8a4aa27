"""Rows that are decoded together: prefill of given tokens, prompts and later replies, and decoding steps.

A step takes a token of each row and gives the logits after it. `CacheSteps` call the unchanged model, over
any caches. A backend may have a compiled program for steps over one copy of each prompt.

The functions of the prefill are generators: they give control after each layer, because a long prefill takes
seconds.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.images import PromptImages, image_rows
from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.image_forward import PositionedCache, forward_with_images
from grpo_fn.policy.policy import Policy
from grpo_fn.trees import arrays_of, map_arrays

T = TypeVar("T")

Prefill = Generator[None, None, T]

PREFILL_TOKENS = 2048  # prompt tokens per row and call: limits the memory of a long prompt's forward pass


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


def prefill(
    model: nn.Module, prompts: Sequence[Sequence[int]], caches: Caches | None = None
) -> Prefill[tuple[mx.array, Caches]]:
    """Run prompts through the model: logits [P,V] after each prompt's last token, and the caches there.

    `caches` hold the tokens before the prompts (ragged caches if these differ in length); None: there are
    none.
    """
    lengths = [len(prompt) - 1 for prompt in prompts]  # the last token is fed separately
    longest = max(lengths)
    ragged = min(lengths) < longest
    if caches is None:
        caches = cache_rows.ragged_caches(model, len(prompts)) if ragged else cache_rows.plain_caches(model)
    if ragged and longest % PREFILL_TOKENS == 1:
        longest += 1  # a single last column would look like a decoding step
    body_pl = mx.array([[*prompt[:-1], *[0] * (longest + 1 - len(prompt))] for prompt in prompts], mx.int32)
    if ragged:
        cache_rows.prepare_padding(caches, lengths, longest)
    for start in range(0, longest, PREFILL_TOKENS):
        model(body_pl[:, start : start + PREFILL_TOKENS], cache=caches)
        yield from computed(cache.state for cache in caches)
    if ragged:
        cache_rows.finish_padding(caches)
    last_p1 = mx.array([[prompt[-1]] for prompt in prompts], mx.int32)
    return model(last_p1, cache=caches)[:, -1], caches


def prefill_once(
    policy: Policy,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    images: Sequence[PromptImages | None] | None = None,
) -> Prefill[tuple[mx.array, Caches]]:
    """`prefill` of prompts whole, padded on the right: logits [P,V], and plain caches of P rows.

    `images` are those of each prompt; None: no prompt has any.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # Padding on the right comes after the prompt, and no token attends to it.
    tokens_pl = mx.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], mx.int32)
    caches = cache_rows.plain_caches(model)
    backbone = policy.split.backbone(model)
    rows = None if images is None else image_rows(images, lengths, longest)
    hidden = []
    for start in range(0, longest, PREFILL_TOKENS):
        part_pl = tokens_pl[:, start : start + PREFILL_TOKENS]
        if rows is None:
            hidden.append(backbone(part_pl, cache=caches))
        else:
            part = rows.columns(start, start + PREFILL_TOKENS)
            positioned = [PositionedCache(cache, part.positions_r3l) for cache in caches]
            hidden.append(forward_with_images(backbone, part_pl, part, positioned))
        yield from computed([*(cache.state for cache in caches), hidden[-1]])
    last_pd = mx.concatenate(hidden, axis=1)[mx.arange(len(prompts)), mx.array(lengths) - 1]
    return policy.split.logits(model, last_pd), caches


def result_of(steps: Generator[Any, None, T]) -> T:
    """Runs a generator to its end: what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def computed(layers: Iterable[Any]) -> Prefill[None]:
    """Computes the arrays of each layer in turn."""
    for layer in layers:
        mx.eval(list(arrays_of(layer)))
        yield


# Steps, the rows that they decode, logits [B,V] of the next token.
Resumed = tuple[CacheSteps, list[int], mx.array]


class Extender:
    """Extends decoding rows by given tokens: one prefill over these rows, into their caches.

    A row whose turn has ended is parked: its caches, of whatever kind, are taken out of the batch. Later it
    is resumed with others, each with its own tokens (ragged). Nothing is computed twice.

    Rows of a model that cannot take rows of different lengths are decoded one by one after their first turn.

    Attributes:
        sees_each_step: whether a row has to be parked before anything is fed after its last token.
    """

    def __init__(self, policy: Policy, model: nn.Module, caches: Caches) -> None:
        """`caches` are those after the prefill, a row for each completion."""
        from mlx_lm.models.cache import BatchKVCache, KVCache

        self._policy, self._model = policy, model
        # Windows and recurrent states cannot give back what they were fed.
        self.sees_each_step = not all(type(cache) in (KVCache, BatchKVCache) for cache in caches)
        self._parked: dict[int, Caches] = {}

    def park(self, steps: Any, places: list[int], rows: list[int], fed: list[int], step: int) -> None:
        """Take the caches of rows out of the batch.

        Args:
            steps: their decoding steps over caches; the batch itself does not change.
            places, rows: their places in the batch, and their numbers.
            fed: tokens of this turn that each row was fed and keeps.
            step: tokens that all rows were fed since these steps began.
        """
        for place, row, tokens in zip(places, rows, fed, strict=True):
            mine = [_row_of(cache, place) for cache in steps.caches]
            for cache in mine if step > tokens else ():
                cache.trim(step - tokens)
            self._parked[row] = mine
        # Otherwise they would keep the batch's buffers.
        mx.eval([list(arrays_of([cache.state for cache in self._parked[row]])) for row in rows])

    def drop(self, row: int) -> None:
        """Forget a parked row."""
        del self._parked[row]

    def resume(self, given: Mapping[int, Sequence[int]]) -> Prefill[list[Resumed]]:
        """Feed parked rows their tokens, at least one each; returns the steps that continue from there."""
        rows = sorted(given)
        parts = [rows] if self._policy.takes_ragged else [[row] for row in rows]
        made: list[Resumed] = []
        for part in parts:
            found = [self._parked.pop(row) for row in part]
            caches = found[0]
            if self._policy.takes_ragged:
                caches = [type(layer[0]).merge(list(layer)) for layer in zip(*found, strict=True)]
            logits_bv, caches = yield from prefill(self._model, [given[row] for row in part], caches)
            mx.eval(logits_bv)
            made.append((CacheSteps(self._model, caches), part, logits_bv))
        return made


def _row_of(cache: Any, place: int) -> Any:
    """A plain cache of one row of a batch."""
    if hasattr(cache, "left_padding") and hasattr(cache, "extract"):  # rows of different lengths
        return cache.extract(place)
    index = mx.array([place], mx.int32)
    state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)
    return type(cache).from_state(state)
