"""Decodes rows together: prefill for given tokens (prompts and replies), and decoding steps.

A step feeds each row a token and returns the logits after it. `CacheSteps` calls the unmodified
model, and works with any kind of caches. A backend may have a compiled program for steps with one
copy of each prompt.

The prefill functions are generators that yield after each layer, because a long prefill takes
seconds.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.compile import Compiled
from grpo_fn.images import PromptImages, image_rows
from grpo_fn.policy.caches import kv_caches as cache_rows
from grpo_fn.policy.caches.kv_caches import Caches
from grpo_fn.policy.caches.prefix_cache import join_prefix_rows, keep_prefix_rows
from grpo_fn.policy.image_forward import PositionedCache, forward_with_images
from grpo_fn.policy.policy import Policy
from grpo_fn.rollout.sampling import Sampling, compiled_draw, distribution_of, mark_seen, penalize
from grpo_fn.trees import arrays_of, map_arrays

T = TypeVar("T")

Prefill = Generator[None, None, T]

# prompt tokens per row and call: limits the memory of a long prompt's forward pass
PREFILL_TOKENS = 2048


class Steps(Protocol):
    """The decoding steps of one batch of rows."""

    drops_rows: bool  # whether `keep_rows` may be called

    def __call__(self, token_b: mx.array) -> mx.array:
        """Feeds each row its token, and returns the logits [B,V] for the next token."""
        ...

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these rows, in ascending order."""

    def join(self, other: Any, old: list[int], new: list[int]) -> list[int] | None:
        """Adds the rows of other steps; returns None and changes nothing if they cannot be decoded
        together.

        Args:
            other: steps right after a prefill.
            old: the rows to keep.
            new: numbers for the new rows.

        Returns:
            the row at each index; -1 means that the index is unused.
        """
        ...


class CacheSteps:
    """Decoding steps in which each row has its own copy of the prompt."""

    drops_rows = True

    def __init__(self, model: nn.Module, caches: Caches, *, joins: bool = False) -> None:
        """Creates the steps. `joins` is whether rows with other lengths can join
        (`kv_caches.hold_all_tokens`).
        """
        self._model, self.caches, self._joins = model, caches, joins
        self._joined = False

    def __call__(self, token_b: mx.array) -> mx.array:
        return self._model(token_b[:, None], cache=self.caches)[:, -1]

    def keep_rows(self, rows: list[int]) -> None:
        cache_rows.keep_rows(self.caches, rows)
        if self._joined:
            cache_rows.drop_padding(self.caches)

    def join(self, other: Any, old: list[int], new: list[int]) -> list[int] | None:
        if type(other) is not type(self) or not (self._joins and other._joins):
            return None
        if len(old) < new[0]:
            self.keep_rows(old)
        self._join(other.caches)
        self._joined = True
        return [*old, *new]

    def _join(self, caches: Caches) -> None:
        cache_rows.join_rows(self.caches, caches)


class PrefixSteps(CacheSteps):
    """Decoding steps in which rows share one copy of each prompt."""

    def keep_rows(self, rows: list[int]) -> None:
        keep_prefix_rows(self.caches, rows)

    def _join(self, caches: Caches) -> None:
        join_prefix_rows(self.caches, caches)


@attrs.define(eq=False)
class RowBatch:
    """Rows that are decoded together, and their state."""

    steps: Steps
    logits_bv: mx.array  # logits of the next token
    bits_nbw: mx.array  # random bits for each draw
    rows: list[int]  # row numbers; -1 for padding rows
    distribution: Sampling = attrs.field(factory=Sampling, converter=distribution_of)
    # the tokens that each row contains, if repetition is penalized
    seen_bv: mx.array | None = None
    # Whether a row that ends has to be noticed before anything is fed after its last token.
    watched: bool = False
    drawn: list[dict[str, mx.array]] = attrs.field(init=False, factory=list)  # since the last check
    alive: set[int] = attrs.field(init=False)  # unfinished rows
    count: int = attrs.field(init=False, default=0)  # used entries of `bits_nbw`
    _draw: Compiled = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.alive = {row for row in self.rows if row >= 0}
        self._draw = compiled_draw(self.distribution)

    @property
    def is_full(self) -> bool:
        """Whether all rows have reached their length limits."""
        return self.count == self.bits_nbw.shape[0]

    def draw(self) -> None:
        """Samples the next token of each row."""
        if self.seen_bv is not None:
            self.logits_bv = penalize(
                self.logits_bv, self.seen_bv, self.distribution.repetition_penalty
            )
        self.drawn.append(self._draw(self.logits_bv, self.bits_nbw[self.count]))
        if self.seen_bv is not None:
            self.seen_bv = mark_seen(self.seen_bv, self.drawn[-1]["tokens"])
        self.count += 1

    def drop_ended(self) -> list[int]:
        """Keeps only the unfinished rows; returns their previous indices."""
        places = self._alive_places()
        self.steps.keep_rows(places)
        index = mx.array(places)
        self.logits_bv, self.bits_nbw = self.logits_bv[index], self.bits_nbw[:, index]
        self.rows = [self.rows[place] for place in places]
        self.seen_bv = None if self.seen_bv is None else self.seen_bv[index]
        return places

    def join(self, other: "RowBatch") -> bool:
        """Adds the rows of a batch that has not sampled yet; returns False if they must stay
        separate.
        """
        if self.distribution != other.distribution:
            return False
        new = range(len(self.rows), len(self.rows) + len(other.rows))
        places = self.steps.join(other.steps, self._alive_places(), list(new))
        if places is None:
            return False
        numbers = [*self.rows, *other.rows, -1]
        self.rows = [numbers[place] for place in places]
        index = mx.array(places)
        left = [batch.bits_nbw[batch.count :] for batch in (self, other)]
        most = max(bits_nbw.shape[0] for bits_nbw in left)
        padded = [
            mx.pad(bits_nbw, [(0, most - bits_nbw.shape[0]), (0, 0), (0, 0)]) for bits_nbw in left
        ]
        self.bits_nbw = mx.concatenate(padded, axis=1)[:, index]
        self.count = 0
        self.logits_bv = mx.concatenate([self.logits_bv, other.logits_bv])[index]
        if self.seen_bv is not None and other.seen_bv is not None:
            self.seen_bv = mx.concatenate([self.seen_bv, other.seen_bv])[index]
        self.alive |= other.alive
        self.watched |= other.watched
        return True

    def _alive_places(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row in self.alive]


def prefill(
    model: nn.Module, prompts: Sequence[Sequence[int]], caches: Caches | None = None
) -> Prefill[tuple[mx.array, Caches]]:
    """Runs prompts through the model; returns the logits [P,V] after each prompt's last token, and
    the caches.

    `caches` contain the tokens before the prompts (ragged caches if the lengths of these tokens
    differ); None means that there are no such tokens.
    """
    lengths = [len(prompt) - 1 for prompt in prompts]  # the last token is fed separately
    longest = max(lengths)
    ragged = min(lengths) < longest
    if caches is None:
        caches = (
            cache_rows.ragged_caches(model, len(prompts))
            if ragged
            else cache_rows.plain_caches(model)
        )
    if ragged and longest % PREFILL_TOKENS == 1:
        longest += 1  # a single last column would look like a decoding step
    body_pl = mx.array(
        [[*prompt[:-1], *[0] * (longest + 1 - len(prompt))] for prompt in prompts], mx.int32
    )
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
    """Runs `prefill` on complete prompts, padded on the right; returns logits [P,V], and plain
    caches of P rows.

    `images` are the images of each prompt; None means that no prompt has images.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # Padding on the right comes after the prompt, and no token attends to it.
    tokens_pl = mx.array(
        [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], mx.int32
    )
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
    """Runs a generator to its end and returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def computed(layers: Iterable[Any]) -> Prefill[None]:
    """Evaluates the arrays of one layer after another."""
    for layer in layers:
        mx.eval(list(arrays_of(layer)))
        yield


def caches_of_row(caches: Caches, place: int, surplus: int) -> Caches | None:
    """Returns plain caches for one row of a batch, without its last `surplus` tokens, or None if
    they cannot be truncated.
    """
    return shortened([_row_of(cache, place) for cache in caches], surplus)


def shortened(caches: Caches, surplus: int) -> Caches | None:
    """Returns the caches without their last `surplus` tokens, or None if they cannot
    be truncated.
    """
    from mlx_lm.models.cache import can_trim_prompt_cache

    if surplus and not can_trim_prompt_cache(caches):
        return None  # sliding windows and recurrent states cannot be truncated
    for cache in caches if surplus else ():
        cache.trim(surplus)
    return caches


def _row_of(cache: Any, place: int) -> Any:
    """Returns a plain cache for one row of a batch."""
    if hasattr(cache, "left_padding") and hasattr(cache, "extract"):  # rows of different lengths
        return cache.extract(place)
    index = mx.array([place], mx.int32)
    state = map_arrays(lambda array: array[index] if array.ndim else array, cache.state)
    return type(cache).from_state(state)
