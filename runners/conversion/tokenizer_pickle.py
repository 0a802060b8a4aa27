"""nanochat's tokenizer.pkl: a pickled `tiktoken.Encoding`, read without running anything that a pickle could.

A pickle is a program. This reader admits only the opcodes that hold texts, bytes, numbers and tables, and one
name, tiktoken's Encoding, for which a stand-in only keeps the data.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.errors import UserError, error_line, show

if TYPE_CHECKING:
    import tiktoken

PICKLE_NAME = "tokenizer.pkl"
# What protocols 4 and 5 write for an Encoding. Nothing here calls what it names, builds tuples that nest, or
# reserves more memory than the file has bytes.
_ADMITTED = {
    *("PROTO", "FRAME", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ", "BUILD", "STOP"),
    *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BININT", "BININT1", "BININT2"),
    *("EMPTY_DICT", "EMPTY_TUPLE", "MARK", "SETITEM", "SETITEMS"),
}
_FIELDS = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}


def find_pickle(folder: Path) -> Path | None:
    """The tokenizer.pkl of a folder, or of its subfolder `tokenizer` (nanochat's layout); or None."""
    places = (folder / PICKLE_NAME, folder / "tokenizer" / PICKLE_NAME)
    return next((place for place in places if place.is_file()), None)


def read_encoding(file: Path) -> tiktoken.Encoding:
    """The encoding in a pickle of protocol 4 or 5.

    Raises UserError if the file cannot be read, if it names something else than tiktoken's Encoding, which is
    neither imported nor called, or if its content is not a vocabulary.
    """
    import tiktoken

    try:
        content = file.read_bytes()
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name not in _ADMITTED:
                raise UserError(
                    f"expected a pickled vocabulary, found the opcode {opcode.name}; nothing was run"
                )
        found = _Reader(io.BytesIO(content)).load()
        return tiktoken.Encoding(**_checked(vars(found)["state"]))
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except Exception as error:  # a broken pickle, or pattern, can fail with any error
        raise UserError(f"{file}: no pickle of tiktoken's Encoding: {error_line(error)}") from error


class _StandIn:
    """Keeps the state that the pickle gives an Encoding."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The stand-in for Encoding; UserError for every other name, before anything is imported."""
        name = f"{module_name}.{global_name}"
        if name != "tiktoken.core.Encoding":
            raise UserError(f"the pickle asks for {show(name)}, not for tiktoken's Encoding; nothing was run")
        return _StandIn


def _checked(state: Any) -> dict[str, Any]:
    """The state, if it is a valid vocabulary; tiktoken itself accepts some that crash it later."""
    if type(state) is not dict or any(type(state.get(key)) is not kind for key, kind in _FIELDS.items()):
        raise UserError("the Encoding has no vocabulary of its own")
    ranks, special = state["mergeable_ranks"], state["special_tokens"]
    ids = [*ranks.values(), *special.values()]
    if {*map(type, ranks)} - {bytes} or {*map(type, special)} - {str} or {*map(type, ids)} - {int}:
        raise UserError("the Encoding's vocabulary is no table from bytes and names to numbers")
    if len(set(ids)) != len(ids) or not all(0 <= number < 2**31 for number in ids):
        raise UserError("the Encoding's ids are not different numbers from 0 to 2^31 - 1")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError("the Encoding has no token for some byte, so not every text has tokens")
    return {key: state[key] for key in _FIELDS}
