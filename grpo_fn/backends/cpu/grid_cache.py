"""Keys and values in a grid of prompts and their rows, and attention over them; for `grid_steps` on a CPU.

    rows [B] = prompts × rows of each [P,G]

A long prompt is held once; short prompts are copied into each of their rows' own part.
"""

import math
from collections.abc import Sequence

import attrs
import mlx.core as mx

from grpo_fn.backends.cpu.attention import weighted_values
from grpo_fn.backends.cpu.blocked_weights import PRODUCT, divisor
from grpo_fn.backends.elementwise import softmax
from grpo_fn.backends.one_token import OneTokenCache

ROOM = 64  # positions: to a multiple of that many prompts are cut
# Prompts up to this length are copied into each of their rows' own part: a fifth fewer operations.
SHORT, STEP = 64, 32

_FEW = 2**14  # scores of which one operation takes less time than the several of `elementwise.softmax`
_LENGTH = 512  # positions of a prompt in one product, at most

Pair = tuple[mx.array, mx.array]  # keys and values


@attrs.frozen(eq=False)
class SharedPrompts:
    """One layer's keys and values of all prompts, cut so that one core takes each product with them."""

    keys: mx.array  # [P,K,C,1,D,L/C]
    values: mx.array  # [P,K,C,1,L/C,D]

    @classmethod
    def of(cls, keys_pkld: mx.array, values_pkld: mx.array) -> "SharedPrompts":
        """Of a buffer [P,K,L,D] whose length divides well."""
        part = divisor(keys_pkld.shape[2], _LENGTH)

        def parts(a: mx.array) -> mx.array:
            return a.reshape(*a.shape[:2], -1, 1, part, a.shape[-1])

        return cls(mx.contiguous(parts(keys_pkld).swapaxes(-1, -2)), mx.contiguous(parts(values_pkld)))

    def of_prompts(self, which: mx.array | slice) -> "SharedPrompts":
        """Of some of them alone."""
        return SharedPrompts(self.keys[which], self.values[which])

    @property
    def _parts(self) -> int:
        return self.keys.shape[2]

    @property
    def count(self) -> int:
        """P."""
        return self.keys.shape[0]

    @property
    def length(self) -> int:
        """L."""
        return self._parts * self.keys.shape[-1]

    def scores(self, q_pkgrd: mx.array) -> mx.array:
        """Products [P,K,G,R,L] of queries [P,K,G,R,D] with all keys."""
        prompts, shared, *rows, width = q_pkgrd.shape
        s_pkcmrl = q_pkgrd.reshape(prompts, shared, 1, -1, self._few(rows), width) @ self.keys
        if self._parts > 1:
            s_pkcmrl = s_pkcmrl.transpose(0, 1, 3, 4, 2, 5)
        return s_pkcmrl.reshape(prompts, shared, *rows, self.length)

    def mixed(self, w_pkgrl: mx.array) -> mx.array:
        """Sums [P,K,G,R,D] of all values with weights [P,K,G,R,L], in float32."""
        prompts, shared, *rows, _ = w_pkgrl.shape
        w_pkmrcl = w_pkgrl.reshape(prompts, shared, -1, self._few(rows), self._parts, self.keys.shape[-1])
        out_pkcmrd = weighted_values(w_pkmrcl.transpose(0, 1, 4, 2, 3, 5), self.values)
        out_pkcmrd = out_pkcmrd.sum(axis=2) if self._parts > 1 else out_pkcmrd
        return out_pkcmrd.reshape(prompts, shared, *rows, -1)

    def _few(self, rows: Sequence[int]) -> int:
        """Of a prompt's rows as many as are one product."""
        return divisor(math.prod(rows), max(PRODUCT // (self.keys.shape[-1] * self.keys.shape[-2]), 1))


@attrs.define(eq=False)
class GridCache(OneTokenCache):
    """One layer's cache while a step is traced."""

    prompt: SharedPrompts | None  # None: `own` begins with it
    own: Pair  # [B,K,T,D]; with the new token once it has come
    at: mx.array  # where in `own` that goes: [1]
    position: mx.array  # of the new token: of all rows, or [B]
    seen: mx.array  # which of all positions a row sees: [P,1,1,1,L+T], or [B,1,1,T] without `prompt`

    @property
    def offset(self) -> mx.array:
        """Position of the next token."""
        return self.position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Take the new key and value [B,K,1,D] in."""
        held, at = self.own, self.at
        self.own = mx.slice_update(held[0], keys, at, (2,)), mx.slice_update(held[1], values, at, (2,))
        return self.own

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Attention [B,H,1,D] over the prompt and the own tokens."""
        rows, shared, room, width = keys.shape
        q_bkrd = (queries * scale).reshape(rows, shared, -1, width)
        own_bkrt = q_bkrd @ keys.swapaxes(-1, -2)
        if self.prompt is None:
            return (self._weights(own_bkrt) @ values).reshape(*queries.shape[:-1], -1)
        length, grid = self.prompt.length, (self.prompt.count, -1, *q_bkrd.shape[1:3])
        scores_pkgrl = self.prompt.scores(q_bkrd.reshape(*grid, width).swapaxes(1, 2))
        both = mx.concatenate([scores_pkgrl.swapaxes(1, 2), own_bkrt.reshape(*grid, room)], axis=-1)
        weights_pgkrx = self._weights(both)
        of_prompt = self.prompt.mixed(weights_pgkrx[..., :length].swapaxes(1, 2)).swapaxes(1, 2)
        of_own = weighted_values(weights_pgkrx[..., length:].reshape(own_bkrt.shape), values)
        out = (of_prompt + of_own.reshape(of_prompt.shape)).astype(queries.dtype)
        return out.reshape(*queries.shape[:-1], -1)

    def _weights(self, scores: mx.array) -> mx.array:
        scores = mx.where(self.seen, scores, mx.finfo(scores.dtype).min)
        return softmax(scores) if scores.size > _FEW else mx.softmax(scores, axis=-1, precise=True)


def shared_prompts(pairs: Sequence[Pair], lengths: Sequence[int]) -> list[SharedPrompts]:
    """Prompts of these lengths by layer, from keys and values [P,K,L,D] that are padded on the right.

    [] where all are short: then they are copied into each row's own part (`copied_length`).
    """
    if copied_length(max(lengths)) is not None:
        return []
    cut = -(-max(lengths) // ROOM) * ROOM
    return [SharedPrompts.of(cut_to(keys, cut), cut_to(values, cut)) for keys, values in pairs]


def copied_length(longest: int) -> int | None:
    """Positions of each row's copy of its prompt, for prompts up to that length; None: they are held once."""
    return -(-longest // STEP) * STEP if longest <= SHORT else None


def cut_to(buffer_pkld: mx.array, length: int) -> mx.array:
    """With that many positions; those past the end of the prompt are masked."""
    missing = length - buffer_pkld.shape[2]
    return longer(buffer_pkld, missing) if missing > 0 else buffer_pkld[:, :, :length]


def longer(buffer_bktd: mx.array, more: int) -> mx.array:
    """With so many zeros behind."""
    shape = (*buffer_bktd.shape[:-2], more, buffer_bktd.shape[-1])
    return mx.concatenate([buffer_bktd, mx.zeros(shape, buffer_bktd.dtype)], axis=-2)
