"""`compiled`: mx.compile for functions of trees. All of this library compiles with it.

`mx.compile` takes no attrs values, and its cache does not see how trees nest: `f([a], b)` and `f([a, b])`
share an entry, and the second call silently gets the first one's program. Here the key is the structure,
shapes and dtypes of the arguments, and each key gets its own function object, and so its own cache.
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

    At most `PROGRAMS` programs are kept; the one that was used longest ago is dropped.

    Attributes:
        traces: how often the Python body has run under the compiler so far.
    """

    def __init__(self, function: Callable[..., Any], *, enabled: bool = True) -> None:
        """Wrap `function`, a pure function of trees to a tree; `enabled=False` calls it as it is.

        A number, a string or None in the arguments is part of the structure: each new value is traced again.
        Pass a number that changes from call to call as a 0-d array.
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
        """The compiled program for arguments like these, and the arguments' arrays in its order.

        For a loop: looking through large trees takes longer than launching a small program. If compiling is
        disabled, the program calls the function as it is.
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
