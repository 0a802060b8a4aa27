"""Decoding steps on CUDA that share one copy of each prompt. The steps are a compiled program whose
attention kernel also writes each row's new key and value in place, so that nothing is copied.

A step on a GPU consists of about 300 small kernels, and launching them takes longer than running
them. A compiled program is launched without running the Python code that describes it. If the
program's buffers keep their addresses, the host can launch the program before the device has
finished the previous step.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends.cuda.decoding.prefix_attention import append_and_attend
from grpo_fn.backends.mechanisms import DecodeProgram
from grpo_fn.compile import Compiled
from grpo_fn.layers import CANNOT_CALL
from grpo_fn.trees import Tree, group_numbers

FIRST_ROOM = 256  # initial buffer size in own tokens; doubled each time the buffers are full
_ROOM_STEP = 64
_PLACES = 16  # rows are padded to multiples of at least this: each number is a separate program


class KernelSteps:
    """Compiled decoding steps. Rows share one copy of their prompt's keys and values; their own
    are written in place.
    """

    drops_rows = False  # each number of rows would be a separate program

    def __init__(
        self,
        step: Compiled,
        params: Tree,
        caches: list[Any],
        lengths: Sequence[int],
        groups: Sequence[int],
        room: int,
    ) -> None:
        """Creates the steps after a prefill.

        Args:
            step: the policy's `kernel_forward`, compiled.
            params: all leaves of the model, as used in the forward pass.
            caches: plain caches of P prompts, padded on the right; their unused columns are used.
            lengths: number of tokens in each prompt.
            groups: number of rows for each prompt.
            room: the maximum number of tokens that can be fed to a row.
        """
        self._step, self._params = step, params
        self._prompts = [(cache.keys, cache.values) for cache in caches]
        self._prompt_of = group_numbers(groups)
        self._lengths = list(lengths)
        self._most = room
        self._room = 0
        self._fed = [0] * len(self._prompt_of)  # own tokens of each row when buffers were created
        self._counts = mx.zeros((0, 0), mx.int32)  # [N,B]: own tokens at each later step
        self._steps = 0  # steps since then
        self._own = [(keys[:0, :, :0], values[:0, :, :0]) for keys, values in self._prompts]

    def __call__(self, token_b: mx.array) -> mx.array:
        if self._steps == self._counts.shape[0]:
            mx.eval(token_b)  # wait for the step that filled the buffers before they are read
            self._grow()
        fed_b = self._counts[self._steps]
        self._steps += 1
        return self._program([*self._fixed, fed_b, token_b])

    def join(self, other: Any, old: list[int], new: list[int]) -> list[int] | None:
        """See `Steps.join`. New rows, which have only been prefilled, replace finished rows."""
        if not isinstance(other, KernelSteps) or other._room:
            return None
        prompts = len(self._lengths)
        places = _placed(len(self._prompt_of), old, new)
        stay = {self._prompt_of[row] for row in old}
        slots = _placed(prompts, stay, range(prompts, prompts + len(other._lengths)))
        slot_of = {prompt: slot for slot, prompt in enumerate(slots)}
        prompt_of = [*self._prompt_of, *(prompts + p for p in other._prompt_of)]
        lengths = [*self._lengths, *other._lengths]
        fed = [*(count + self._steps for count in self._fed), *other._fed]
        self._prompt_of = [slot_of[prompt_of[row]] if row >= 0 else 0 for row in places]
        self._lengths = [lengths[prompt] if prompt >= 0 else 1 for prompt in slots]
        self._fed = [fed[row] if row >= 0 else 0 for row in places]
        self._counts = self._counts[:0]  # the next step creates new buffers
        self._steps = 0
        index = mx.array([slot_of[prompts + p] for p in range(len(other._lengths))], mx.int32)
        self._prompts = [
            (
                _inserted(keys, new_keys, index, len(slots)),
                _inserted(values, new_values, index, len(slots)),
            )
            for (keys, values), (new_keys, new_values) in zip(
                self._prompts, other._prompts, strict=True
            )
        ]
        self._most = max(self._most, other._most)
        return places

    def _grow(self) -> None:
        """Creates buffers with room for one more token per row, and the program for them."""
        self._fed = [count + self._steps for count in self._fed]
        self._steps = 0
        used = max(self._fed)
        room = FIRST_ROOM
        while room <= used:
            room *= 2
        needed = -(-max(self._most, used + 1) // _ROOM_STEP) * _ROOM_STEP
        self._room = max(self._room, min(room, needed))
        rows = len(self._prompt_of)
        self._own = [
            (_enlarged(keys, rows, self._room), _enlarged(values, rows, self._room))
            for keys, values in self._own
        ]
        later = mx.arange(self._room - used, dtype=mx.int32)
        self._counts = later[:, None] + mx.array(self._fed, mx.int32)
        starts = [self._lengths[p] for p in self._prompt_of]
        of_rows = [mx.array(each, mx.int32) for each in (self._prompt_of, self._lengths, starts)]
        # Arrays that are written in place must exist.
        mx.eval(self._own, self._prompts, of_rows, self._counts)
        self._program, leaves = self._step.program(
            self._params,
            self._prompts,
            self._own,
            tuple(of_rows),
            self._counts[0],
            mx.zeros((rows,), mx.int32),
        )
        self._fixed = leaves[:-2]  # counts and tokens differ in each step


def _placed(size: int, old: Iterable[int], new: Sequence[int]) -> list[int]:
    """Returns the entry at each index. Old entries keep their indices, and new entries are put
    between and after them; -1 marks an unused index.
    """
    at = {place: place for place in old}
    if (needed := len(at) + len(new)) > size:
        step = max(_PLACES, 1 << max(needed.bit_length() - 3, 0))
        size = -(-needed // step) * step
    free = [place for place in range(size) if place not in at]
    at |= zip(free, new, strict=False)
    return [at.get(place, -1) for place in range(size)]


def _enlarged(array: mx.array, rows: int, columns: int) -> mx.array:
    """Pads [B,K,T,D] with zeros after its rows and columns."""
    if (array.shape[0], array.shape[2]) == (rows, columns):
        return array
    larger = mx.zeros((rows, array.shape[1], columns, array.shape[3]), array.dtype)
    larger[: array.shape[0], :, : array.shape[2]] = array
    return larger


def _inserted(array: mx.array, new: mx.array, places: mx.array, rows: int) -> mx.array:
    """Resizes [B,K,T,D] to this number of rows and writes the new rows at these indices."""
    larger = _enlarged(array, rows, max(array.shape[2], new.shape[2]))
    larger[places, :, : new.shape[2]] = new
    return larger


@attrs.frozen(eq=False)
class KernelCache:
    """One layer's cache while a step is traced; `own` is updated in place."""

    prompt: tuple[mx.array, mx.array]  # keys and values [P,K,L,D]
    own: tuple[mx.array, mx.array]  # [B,K,T,D]
    prompt_of_b: mx.array
    lengths_p: mx.array
    start_b: mx.array  # position of the first own token
    used_b: mx.array  # own tokens so far
    # this step's rotations, for all layers: see `decode_blocks`
    turns: dict[Any, mx.array] = attrs.field(factory=dict)

    @property
    def offset(self) -> mx.array:
        """Position of the next token."""
        return self.start_b + self.used_b

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Returns None: a new token attends to all earlier tokens, so it needs no mask."""
        if length != 1 or window_size is not None:
            raise ValueError(
                f"length = {length}, window_size = {window_size}: expected 1 and no window"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the new key and value unchanged, because the kernel stores them."""
        return keys, values

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Computes attention [B,H,1,D] over the prompt, the row's own tokens so far, and the new
        token.
        """
        return append_and_attend(
            queries,
            keys,
            values,
            self.prompt[0],
            self.prompt[1],
            self.own[0],
            self.own[1],
            self.prompt_of_b,
            self.lengths_p,
            self.used_b,
            scale,
        )


def kernel_forward(
    bound: Callable[[Tree, Tree], AbstractContextManager[nn.Module]],
    params: Tree,
    prompts: list[tuple[mx.array, mx.array]],
    own: list[tuple[mx.array, mx.array]],
    rows: tuple[mx.array, mx.array, mx.array],
    used_b: mx.array,
    token_b: mx.array,
) -> mx.array:
    """Runs one decoding step. A policy compiles this function for `KernelSteps`; `params` are all
    leaves of the model.
    """
    turns: dict[Any, mx.array] = {}
    prompt_of_b, lengths_p, start_b = rows
    caches = [
        KernelCache(prompt, mine, prompt_of_b, lengths_p, start_b, used_b, turns)
        for prompt, mine in zip(prompts, own, strict=True)
    ]
    with bound(params, {}) as model:
        return model(token_b[:, None], cache=caches)[:, -1]


def takes_steps(module: nn.Module, caches: list[Any]) -> bool:
    """Returns whether `KernelSteps` can decode a model that shares prefixes.

    The function builds a compiled step without evaluating it, because a model that reads values
    while it runs cannot be compiled. `caches` must be plain and empty.
    """

    def step(token_b: mx.array) -> mx.array:
        module(mx.zeros((2, 3), mx.int32), cache=caches)
        index = mx.array([0, 0, 1], mx.int32)
        lengths = mx.array([3, 2], mx.int32)
        start = mx.array([3, 3, 2], mx.int32)
        layers = []
        for cache in caches:
            prompt = cache.keys, cache.values
            own = mx.repeat(cache.keys, 2, axis=0)[:3], mx.repeat(cache.values, 2, axis=0)[:3]
            layers.append(
                KernelCache(prompt, own, index, lengths, start, mx.array([1, 1, 0], mx.int32))
            )
        return module(token_b[:, None], cache=layers)

    try:
        mx.compile(step)(mx.zeros((3,), mx.int32))
    except CANNOT_CALL:
        return False
    return True


PROGRAM = DecodeProgram(KernelSteps, kernel_forward, takes_steps)
