"""The one way in which this library compiles.

`mx.compile` takes no attrs values, and its cache does not see how trees nest: `f([a], b)` and `f([a, b])`
share an entry, and the second call silently gets the first one's program. Here structure, shapes and dtypes
of the arguments are a key of our own, and each key gets a function object, hence a cache, of its own.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from grpo_fn.process_check import check_process
from grpo_fn.trees import map_arrays, structure_of

PROGRAMS = 128  # of one function; each is a graph of some thousand operations


class _Hole:
    """Marks the place of an array in a template."""


class _Template:
    """A tree without its arrays, each of which would pin its memory."""

    def __init__(self, tree: Any) -> None:
        # Kept here, as importlib.reload gives the name another class.
        self._kind = _Hole
        hole = self._kind()
        self._tree = map_arrays(lambda _: hole, tree)

    def fill(self, leaves: list[mx.array]) -> Any:
        """The tree with these arrays in place of its own, in their order."""
        remaining = iter(leaves)
        return map_arrays(lambda _: next(remaining), self._tree, kind=self._kind)


class Compiled:
    """A function of trees, compiled once per structure, shapes and dtypes of its arguments.

    Of more than `PROGRAMS` programs the one that was used longest ago is dropped.

    Attributes:
        traces: how often the Python body has run under the compiler so far.
    """

    def __init__(self, function: Callable[..., Any], *, enabled: bool = True) -> None:
        """Wrap `function`, a pure function of trees to a tree; `enabled=False` calls it as it is.

        What is not an array in the arguments (a number, a string, None) is part of the structure: each new
        value is traced anew. Pass what changes from call to call as a 0-d array.
        """
        self.traces = 0
        self._function = function
        self._enabled = enabled
        self._programs: dict[Any, Callable[[list[mx.array]], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        if not self._enabled:
            check_process()
            return self._function(*args)
        program, leaves = self.program(*args)
        return program(leaves)

    def program(self, *args: Any) -> tuple[Callable[[list[mx.array]], Any], list[mx.array]]:
        """What computes the function for arguments like these from their arrays, and these arrays in order.

        For a loop: looking through large trees takes longer than launching a small program. Where compiling
        is disabled, it calls the function as it is.
        """
        check_process()
        leaves: list[mx.array] = []
        structure = structure_of(args, leaves)
        if not self._enabled:
            arguments = _Template(args)
            return (lambda leaves: self._function(*arguments.fill(leaves))), leaves
        key = (structure, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves))
        program = self._programs.pop(key, None) or self._compile_for(args)
        self._programs[key] = program  # as the last
        if len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program, leaves

    def _compile_for(self, example: tuple[Any, ...]) -> Callable[[list[mx.array]], Any]:
        arguments = _Template(example)
        result_template: list[_Template] = []

        def flat(leaves: list[mx.array]) -> list[mx.array]:
            self.traces += 1
            result = self._function(*arguments.fill(leaves))
            found: list[mx.array] = []
            structure_of(result, found)
            result_template[:] = [_Template(result)]
            return found

        program = mx.compile(flat)

        def call(leaves: list[mx.array]) -> Any:
            found = program(leaves)  # fills the template the first time
            return result_template[0].fill(found)

        return call


def compiled(function: Callable[..., Any], *, enabled: bool = True) -> Compiled:
    """Compile a pure function of trees (attrs values included); see `Compiled`."""
    return Compiled(function, enabled=enabled)
