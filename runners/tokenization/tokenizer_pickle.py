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
_ENCODING = "tiktoken.core.Encoding"
_MAX_ID = 2**31 - 1
# What protocols 4 and 5 write for an Encoding. Nothing here calls what it names, builds tuples that nest, or
# reserves more memory than the file has bytes.
_ADMITTED = {
    *("PROTO", "FRAME", "MEMOIZE", "BINGET", "LONG_BINGET", "STACK_GLOBAL", "NEWOBJ", "BUILD", "STOP"),
    *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BININT", "BININT1", "BININT2"),
    *("EMPTY_DICT", "EMPTY_TUPLE", "MARK", "SETITEM", "SETITEMS"),
}
_FIELDS = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}


def find_pickle(folder: Path) -> Path | None:
    """The tokenizer.pkl of a model folder, or of its subfolder `tokenizer` (nanochat's layout); or None."""
    places = (folder / PICKLE_NAME, folder / "tokenizer" / PICKLE_NAME)
    return next((place for place in places if place.is_file()), None)


def read_encoding(file: Path) -> tiktoken.Encoding:
    """The encoding in a pickle of protocol 4 or 5.

    Raises UserError if the file cannot be read, if it names something else than tiktoken's Encoding (the
    message has the name; it is neither imported nor called), or if its content is not a vocabulary.
    """
    try:
        state = encoding_state(file.read_bytes())
        import tiktoken

        return tiktoken.Encoding(**state)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except ValueError as error:  # from tiktoken, for an invalid regular expression
        raise UserError(f"{file}: tiktoken does not take it: {error_line(error)}") from error


def encoding_state(content: bytes) -> dict[str, Any]:
    """The arguments of `tiktoken.Encoding` that a pickle of one holds: name, pat_str, mergeable_ranks,
    special_tokens. Raises UserError, without the file's name, for anything else."""
    try:
        _check_opcodes(content)
        found = _Reader(io.BytesIO(content)).load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle can fail with any error
        raise UserError(f"this is no pickle that can be read: {error_line(error)}") from error
    if not isinstance(found, _StandIn):
        raise UserError(f"expected tiktoken's Encoding, found a pickled {type(found).__name__}")
    return _checked(vars(found).get("state"))


def _check_opcodes(content: bytes) -> None:
    for opcode, _, _ in pickletools.genops(content):
        if opcode.name not in _ADMITTED:
            raise UserError(
                f"expected a pickle of protocol 4 or 5 that only holds a vocabulary, found the opcode "
                f"{opcode.name}; none of it was run"
            )


class _StandIn:
    """Keeps the state that the pickle gives an Encoding."""

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The stand-in for Encoding; UserError for every other name, before anything is imported."""
        name = f"{module_name}.{global_name}"
        if name != _ENCODING:
            raise UserError(
                f"the pickle asks for {show(name)}; only tiktoken's Encoding is admitted, as a pickle can "
                "run any code; none of this one was run"
            )
        return _StandIn


def _checked(state: Any) -> dict[str, Any]:
    """The state, if it is a valid vocabulary; tiktoken itself accepts some that crash it later."""
    if type(state) is not dict:
        raise UserError(f"the Encoding's state: expected its vocabulary, found {type(state).__name__}")
    for key, kind in _FIELDS.items():
        if type(state.get(key)) is not kind:
            found = type(state[key]).__name__ if key in state else "nothing"
            raise UserError(f"the Encoding's {key}: expected {kind.__name__}, found {found}")
    ranks, special = state["mergeable_ranks"], state["special_tokens"]
    for key, table, kind in (("mergeable_ranks", ranks, bytes), ("special_tokens", special, str)):
        if {*map(type, table)} - {kind} or {*map(type, table.values())} - {int}:
            raise UserError(f"the Encoding's {key} is not a table from {kind.__name__} to int")
    ids = [*ranks.values(), *special.values()]
    if len(set(ids)) != len(ids) or not all(0 <= number <= _MAX_ID for number in ids):
        raise UserError("the Encoding's ids are not different numbers from 0 to 2^31 - 1")
    lacking = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lacking is not None:
        raise UserError(
            f"the Encoding has no token for the byte {lacking:#04x}, so not every text has tokens"
        )
    return {key: state[key] for key in _FIELDS}
