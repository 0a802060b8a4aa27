"""Decoding steps on a CPU, over one copy of each prompt: a compiled program of rows that stand in a grid.

    rows [B] = prompts × rows of each [P,G]

To describe an operation in Python, and to hand it out, takes longer on a CPU than many an operation of a
small model. A compiled step is described once. Its shapes stay for a while: own tokens have room for 64 more
at a time, prompts are cut to a multiple of 64, and rows leave so that a grid is left, of half the prompts or
half the rows of each. Each shape is a program of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cpu.blocked_weights import takes_blocks
from grpo_fn.backends.cpu.grid_cache import (
    GridCache,
    Pair,
    SharedPrompts,
    copied_length,
    cut_to,
    longer,
)
from grpo_fn.backends.decoding import halve_down_to, with_others
from grpo_fn.backends.mechanisms import DecodeProgram
from grpo_fn.compile import Compiled
from grpo_fn.layers import CANNOT_CALL
from grpo_fn.trees import Tree, arrays_of

ROOM = 64  # tokens by which the rows' own part grows


class GridSteps:
    """Steps over one copy of each prompt, compiled; every prompt has as many rows."""

    def __init__(
        self,
        step: Compiled,
        params: Tree,
        pairs: list[Pair],
        prompts: list[SharedPrompts],
        lengths: Sequence[int],
        group_size: int,
        room: int,
        *,
        drawn: int = 0,
    ) -> None:
        """After a prefill.

        Args:
            step: `grid_forward` of the policy, compiled.
            params: all leaves of the model, as they are in the forward.
            pairs: each layer's keys and values [P,K,L,D], padded on the right.
            prompts: what `shared_prompts` makes of them.
            lengths: tokens of each prompt.
            group_size: rows of each prompt.
            room: tokens that a row may be fed.
            drawn: go on as if so many zeros had been fed.
        """
        self._step, self._params = step, params
        self._lengths, self._group_size, self._most = list(lengths), group_size, room
        self._first = len(self._lengths), group_size
        self._used, self._room = drawn, self._enough(drawn)
        self._prompts, self._own = list(prompts), list(pairs)
        self._each_own(self._none if prompts else self._begun)
        self._prepare()

    def __call__(self, token_b: mx.array) -> mx.array:
        """As `decode_step.Steps`."""
        if self._used == self._room:
            self._room = self._enough(self._used)
            more = self._room - self._used
            self._each_own(lambda own: longer(own, more))
            self._prepare()
        own = [a for pair in self._own for a in pair]
        self._own = []  # or what they hold would be copied, not written to
        leaves = [*self._fixed, *own, self._counts[self._used], token_b]
        self._used += 1
        logits_bv, self._own = self._program(leaves)
        return logits_bv

    def rows_to_keep(self, alive: Sequence[bool]) -> list[int]:
        """A smaller grid: prompts with a row that is alive, and as many rows of each as the liveliest has.

        Both are the first numbers, halved as often as that holds.
        """
        groups = [alive[start : start + self._group_size] for start in range(0, len(alive), self._group_size)]
        live = [p for p, group in enumerate(groups) if any(group)]
        rows = halve_down_to(max(sum(group) for group in groups), self._first[1])
        places = []
        for p in with_others(live, halve_down_to(len(live), self._first[0]), len(groups)):
            mine = [g for g, is_alive in enumerate(groups[p]) if is_alive]
            places += [p * self._group_size + g for g in with_others(mine, rows, self._group_size)]
        return places

    def keep_rows(self, rows: list[int]) -> None:
        """As `decode_step.Steps`; of each prompt as many, or none."""
        prompts = sorted({row // self._group_size for row in rows})
        index, which = mx.array(rows, mx.int32), mx.array(prompts, mx.int32)
        self._each_own(lambda own: own[index])
        if len(prompts) < len(self._lengths):
            self._prompts = [prompt.of_prompts(which) for prompt in self._prompts]
            self._lengths = [self._lengths[p] for p in prompts]
        self._group_size = len(rows) // len(prompts)
        self._prepare()

    def _each_own(self, change: Callable[[mx.array], mx.array]) -> None:
        """One layer after the other: the old and the new of one are in memory."""
        for number, pair in enumerate(self._own):
            keys, values = map(change, pair)
            mx.eval(keys, values)
            self._own[number] = keys, values

    def _none(self, prompt_pkld: mx.array) -> mx.array:
        prompts, shared, _, width = prompt_pkld.shape
        return mx.zeros((prompts * self._group_size, shared, self._room, width), prompt_pkld.dtype)

    def _begun(self, prompt_pkld: mx.array) -> mx.array:
        prompt_pkld = cut_to(prompt_pkld, copied_length(max(self._lengths)) or 0)
        return longer(mx.repeat(prompt_pkld, self._group_size, axis=0), self._room)

    def _enough(self, used: int) -> int:
        """Room for own tokens, when the next one comes."""
        return min(used // ROOM * ROOM + ROOM, -(-max(self._most, used + 1) // 16) * 16)

    def _prepare(self) -> None:
        """Find the program for the shapes as they are, and what it takes beside the own tokens."""
        rows = len(self._lengths) * self._group_size
        one_length = min(self._lengths) == max(self._lengths)
        starts = [length for length in self._lengths for _ in range(self._group_size)]
        fixed = (
            self._params,
            self._prompts,
            self._room,
            mx.array(self._lengths, mx.int32),
            mx.array(starts[0] if one_length else starts, mx.int32),
        )
        self._counts = mx.arange(self._room, dtype=mx.int32)
        mx.eval(list(arrays_of((fixed[1:], self._own, self._counts))))
        self._program, leaves = self._step.program(
            *fixed, self._own, self._counts[0], mx.zeros((rows,), mx.int32)
        )
        self._fixed = leaves[: -2 * len(self._own) - 2]


def grid_forward(
    bound: Callable[[Tree, Tree], AbstractContextManager[nn.Module]],
    params: Tree,
    prompts: list[SharedPrompts],
    room: int,
    lengths_p: mx.array,
    start: mx.array,
    own: list[Pair],
    used: mx.array,
    token_b: mx.array,
) -> tuple[mx.array, list[Pair]]:
    """The function that a policy compiles for `GridSteps`; `params` are all leaves of the model.

    Args as its fields; `prompts` is empty where `own` begins with them.

    Returns:
        Logits [B,V], and the own keys and values with the new ones.
    """
    inside = own[0][0].shape[2] - room
    length = prompts[0].length if prompts else inside
    seen_pl = mx.arange(length) < lengths_p[:, None]
    seen_pt = mx.broadcast_to(mx.arange(room) <= used, (seen_pl.shape[0], room))
    seen_px = mx.concatenate([seen_pl, seen_pt], axis=1)[:, None, None]
    rows = token_b.shape[0] // lengths_p.shape[0]
    seen = seen_px[:, None] if prompts else mx.repeat(seen_px, rows, axis=0)
    at, position = (inside + used)[None], start + used
    caches = [
        GridCache(prompt, mine, at, position, seen)
        for prompt, mine in zip(prompts or [None] * len(own), own, strict=True)
    ]
    with bound(params, {}) as model:
        logits = model(token_b[:, None], cache=caches)[:, -1]
    return logits, [cache.own for cache in caches]


def takes_steps(module: nn.Module, caches: list[Any]) -> bool:
    """Whether a model that shares prefixes can be decoded with `GridSteps`.

    Found by building a compiled step, not computing it: what looks at a number on the way cannot be compiled.
    `caches` are plain and empty.
    """

    def step(token_b: mx.array) -> mx.array:
        module(mx.zeros((2, 3), mx.int32), cache=caches)
        at, position, seen = mx.array([0]), mx.array([3, 3, 2, 2]), mx.ones((2, 1, 1, 1, 5), mx.bool_)
        layers = []
        for cache in caches:
            pair = cache.keys[:, :, :3], cache.values[:, :, :3]
            keys, values = (mx.zeros((4, a.shape[1], 2, a.shape[3]), a.dtype) for a in pair)
            layers.append(GridCache(SharedPrompts.of(*pair), (keys, values), at, position, seen))
        return module(token_b[:, None], cache=layers)

    try:
        mx.compile(step)(mx.zeros((4,), mx.int32))
    except CANNOT_CALL:
        return False
    return True


PROGRAM = DecodeProgram(GridSteps, grid_forward, takes_steps, takes_blocks)
