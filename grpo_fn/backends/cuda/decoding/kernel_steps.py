"""Decoding steps on CUDA, over one copy of each prompt: a compiled program whose attention is one kernel that
also keeps the row's new key and value, in place: nothing grows, nothing is copied.

A step on a GPU has some 300 small kernels, and launching them takes longer than running them. A compiled
program is launched without the Python that describes it. If its buffers keep their place, it can be launched
ahead of the device.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cuda.decoding.prefix_attention import append_and_attend
from grpo_fn.backends.mechanisms import DecodeProgram
from grpo_fn.compile import Compiled
from grpo_fn.layers import CANNOT_CALL
from grpo_fn.trees import Tree

FIRST_ROOM = 256  # own tokens for which buffers first have room; doubled each time they are full
_ROOM_STEP = 64


class KernelSteps:
    """Steps over one copy of each prompt, compiled; each row's keys and values are written in place."""

    drops_rows = False  # each number of rows would be a program of its own

    def __init__(
        self,
        step: Compiled,
        params: Tree,
        caches: list[Any],
        lengths: Sequence[int],
        groups: Sequence[int],
        room: int,
    ) -> None:
        """After a prefill.

        Args:
            step: `kernel_forward` of the policy, compiled.
            params: all leaves of the model, as they are in the forward.
            caches: plain ones after P prompts, padded on the right; their spare room is used.
            lengths: tokens of each prompt.
            groups: rows of each prompt.
            room: tokens that a row may be fed.
        """
        self._step, self._params = step, params
        self._prompts = [(cache.keys, cache.values) for cache in caches]
        prompt_of = [p for p in range(len(lengths)) for _ in range(groups[p])]
        one_length = min(lengths) == max(lengths)
        starts = lengths[0] if one_length else [lengths[p] for p in prompt_of]
        self._rows = (
            mx.array(prompt_of, mx.int32),
            mx.array(list(lengths), mx.int32),
            mx.array(starts, mx.int32),
        )
        self._most = room
        self._used = 0
        self._own: list[tuple[mx.array, mx.array]] = []
        self._grow()

    def __call__(self, token_b: mx.array) -> mx.array:
        if self._used == self._room:
            mx.eval(token_b)  # wait for the step that filled the buffers before they are read
            self._grow()
        used = self._counts[self._used]
        self._used += 1
        return self._program([*self._fixed, used, token_b])

    def join(self, other: Any) -> bool:
        """No rows join: see `Steps`."""
        return False

    def _grow(self) -> None:
        room = FIRST_ROOM
        while room <= self._used:
            room *= 2
        self._room = min(room, -(-max(self._most, self._used + 1) // _ROOM_STEP) * _ROOM_STEP)
        rows = self._rows[0].shape[0]
        own = []
        for number, (keys, values) in enumerate(self._prompts):
            shapes = [(rows, a.shape[1], self._room, a.shape[3]) for a in (keys, values)]
            new_keys, new_values = (mx.zeros(shape, keys.dtype) for shape in shapes)
            if self._own:
                old_keys, old_values = self._own[number]
                new_keys[:, :, : old_keys.shape[2]] = old_keys
                new_values[:, :, : old_values.shape[2]] = old_values
            own.append((new_keys, new_values))
        self._own = own
        self._counts = mx.arange(self._room, dtype=mx.int32)
        self._prepare()

    def _prepare(self) -> None:
        mx.eval(self._own, self._rows, self._counts)  # arrays that are written in place must exist
        example = self._counts[0], mx.zeros((self._rows[0].shape[0],), mx.int32)
        self._program, leaves = self._step.program(
            self._params, self._prompts, self._own, self._rows, *example
        )
        self._fixed = leaves[: -len(example)]


@attrs.frozen(eq=False)
class KernelCache:
    """One layer's cache while a step is traced; it adds to `own` in place."""

    prompt: tuple[mx.array, mx.array]  # keys and values [P,K,L,D]
    own: tuple[mx.array, mx.array]  # [B,K,T,D]
    prompt_of_b: mx.array
    lengths_p: mx.array
    start: mx.array  # position of the first own token: of all rows, or [B]
    used: mx.array  # own tokens so far, the same of all rows
    # rotations of this step, of all layers: `decode_blocks`
    turns: dict[Any, mx.array] = attrs.field(factory=dict)

    @property
    def offset(self) -> mx.array:
        """Position of the next token."""
        return self.start + self.used

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: a new token sees all earlier ones."""
        if length != 1 or window_size is not None:
            raise ValueError(f"length = {length}, window_size = {window_size}: expected 1 and no window")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The new key and value; the kernel stores them."""
        return keys, values

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Attention [B,H,1,D] over the prompt, the own tokens so far and the new one."""
        return append_and_attend(
            queries, keys, values, *self.prompt, *self.own, self.prompt_of_b, self.lengths_p, self.used, scale
        )


def kernel_forward(
    bound: Callable[[Tree, Tree], AbstractContextManager[nn.Module]],
    params: Tree,
    prompts: list[tuple[mx.array, mx.array]],
    own: list[tuple[mx.array, mx.array]],
    rows: tuple[mx.array, mx.array, mx.array],
    used: mx.array,
    token_b: mx.array,
) -> mx.array:
    """The function that a policy compiles for `KernelSteps`; `params` are all leaves of the model."""
    turns: dict[Any, mx.array] = {}
    caches = [
        KernelCache(prompt, mine, *rows, used, turns) for prompt, mine in zip(prompts, own, strict=True)
    ]
    with bound(params, {}) as model:
        return model(token_b[:, None], cache=caches)[:, -1]


def takes_steps(module: nn.Module, caches: list[Any]) -> bool:
    """Whether a model that shares prefixes can be decoded with `KernelSteps`.

    This is found by building a compiled step without computing it: a model that reads numbers in between
    cannot be compiled. `caches` are plain and empty.
    """

    def step(token_b: mx.array) -> mx.array:
        module(mx.zeros((2, 3), mx.int32), cache=caches)
        index, lengths = mx.array([0, 0, 1], mx.int32), mx.array([3, 2], mx.int32)
        start = mx.array([3, 3, 2], mx.int32)
        layers = []
        for cache in caches:
            prompt = cache.keys, cache.values
            own = mx.repeat(cache.keys, 2, axis=0)[:3], mx.repeat(cache.values, 2, axis=0)[:3]
            layers.append(KernelCache(prompt, own, index, lengths, start, mx.array(1, mx.int32)))
        return module(token_b[:, None], cache=layers)

    try:
        mx.compile(step)(mx.zeros((3,), mx.int32))
    except CANNOT_CALL:
        return False
    return True


PROGRAM = DecodeProgram(KernelSteps, kernel_forward, takes_steps)
