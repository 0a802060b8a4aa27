"""`compiled`, an mx.compile for functions of trees. All compiled functions of this library use it.

`mx.compile` does not accept attrs values, and its cache ignores the nesting of trees: `f([a], b)`
and `f([a, b])` share an entry, so the second call silently runs the first call's program. Here, the
key of the cache is the structure, shapes and dtypes of the arguments, and each key has its own
function object and thus its own cache.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from grpo_fn.process_check import check_process
from grpo_fn.trees import map_arrays, structure_of

PROGRAMS = 128  # most programs per function; each is a graph of several thousand operations
_SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"  # mlx::core::set_compile_mode
_UNFUSED, _FUSED = 2, 3  # two of MLX's modes


def _refill(tree: Any) -> Callable[[list[mx.array]], Any]:
    """Returns a function that fills the tree's structure with given arrays; the function does not
    keep the tree's own arrays.
    """
    hole = type("Hole", (), {})  # marks the place of an array
    empty = map_arrays(lambda _: hole(), tree)

    def fill(leaves: list[mx.array]) -> Any:
        remaining = iter(leaves)
        return map_arrays(lambda _: next(remaining), empty, kind=hole)

    return fill


class Compiled:
    """A function of trees, compiled once per structure, shapes and dtypes of its arguments.

    At most `PROGRAMS` programs are kept; the least recently used one is dropped.

    Attributes:
        traces: number of times that the compiler has run the Python body.
    """

    def __init__(
        self, function: Callable[..., Any], *, enabled: bool = True, fuse: bool = True
    ) -> None:
        """Wraps `function`, a pure function from trees to a tree; `enabled=False` calls it without
        compiling.

        `fuse=False` traces it once and keeps its operations unfused, so that no kernel is compiled.
        If this MLX has no such mode, the function is called without compiling.

        A number, a string or None in the arguments is part of the structure, so each new value
        causes a new trace. Pass a number that changes between calls as a 0-d array.
        """
        self.traces = 0
        self._function = function
        self._enabled = enabled and (fuse or _mode_setter() is not None)
        self._fuse = fuse
        self._programs: dict[Any, Callable[[list[mx.array]], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if not self._enabled:
            check_process()
            return self._function(*args)
        program, leaves = self.program(*args)
        return program(leaves)

    def program(self, *args: Any) -> tuple[Callable[[list[mx.array]], Any], list[mx.array]]:
        """Returns the compiled program for arguments with this structure, and the arguments' arrays
        in the program's order.

        Use `program` in loops, because inspecting large trees takes longer than launching a small
        program. If compiling is disabled, the program calls the function directly.
        """
        check_process()
        leaves: list[mx.array] = []
        structure = structure_of(args, leaves)
        if not self._enabled:
            fill = _refill(args)
            return (lambda leaves: self._function(*fill(leaves))), leaves
        key = (structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves))
        program = self._programs.pop(key, None) or self._compile_for(args)
        self._programs[key] = program  # most recently used
        if len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program, leaves

    def _compile_for(self, example: tuple[Any, ...]) -> Callable[[list[mx.array]], Any]:
        fill_arguments = _refill(example)
        fill_result: list[Callable[[list[mx.array]], Any]] = []

        def flat(leaves: list[mx.array]) -> list[mx.array]:
            self.traces += 1
            result = self._function(*fill_arguments(leaves))
            found: list[mx.array] = []
            structure_of(result, found)
            fill_result[:] = [_refill(result)]
            return found

        program = mx.compile(flat)

        def call(leaves: list[mx.array]) -> Any:
            if fill_result or self._fuse:
                found = program(leaves)  # sets `fill_result` the first time
            else:
                with _unfused():
                    found = program(leaves)
            return fill_result[0](found)

        return call


def compiled(function: Callable[..., Any], *, enabled: bool = True, fuse: bool = True) -> Compiled:
    """Compiles a pure function of trees (attrs values included); see `Compiled`."""
    return Compiled(function, enabled=enabled, fuse=fuse)


def recomputed(primals: Any, cotangent: mx.array) -> Any:
    """Marks arrays for recomputation in a backward pass, which then needs less memory.

    Otherwise, `mx.compile` would merge two computations from the same array and keep the result of
    the forward pass. The returned arrays depend on the cotangent, so nothing is merged.
    """
    return mx.depends(list(primals), [cotangent])


def round_up(size: int) -> int:
    """Rounds a size up to one of 8 steps per octave (16, 18, 20, …), so that few shapes occur;
    sizes up to 16 are unchanged.
    """
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


@contextmanager
def _unfused() -> Iterator[None]:
    """Inside the `with` block, traced operations are not fused. If compiling was disabled, it stays
    disabled.
    """
    setter = _mode_setter()
    if setter is None or not _compiles():
        yield
        return
    setter(_UNFUSED)
    try:
        yield
    finally:
        setter(_FUSED)


@functools.cache
def _mode_setter() -> Callable[[int], Any] | None:
    """Returns MLX's C++ function that sets the compile mode, which has no Python binding, or None
    if the library does not contain it.
    """
    folder = mx.__file__.rpartition("/")[0]
    for name in ("libmlx.so", "libmlx.dylib"):
        try:
            return getattr(ctypes.CDLL(f"{folder}/lib/{name}"), _SET_MODE)
        except (OSError, AttributeError):
            continue
    return None


def _compiles() -> bool:
    """Returns whether mx.compile is enabled; `mx.disable_compile` may have been called."""
    calls = []
    probe = mx.compile(lambda x: calls.append(1) or x + 1)
    for _ in range(2):
        probe(mx.array(0))
    return len(calls) == 1
