"""nanochat's tokenizer.pkl: a pickled `tiktoken.Encoding`, read without running anything that a pickle could.

A pickle is a program. This reader provides only two names, tiktoken's Encoding and the function that protocol
2 uses for bytes. Both are stand-ins made for each reading; every other name is refused.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.errors import UserError, error_line, show

if TYPE_CHECKING:
    import tiktoken

PICKLE_NAME = "tokenizer.pkl"
_MAX_ID = 2**31 - 1
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_PLAIN = {
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "GLOBAL", "STACK_GLOBAL", "REDUCE"),
}
"""Opcodes that leave a text, bytes, or one of the two admitted names on the stack."""
_FIELDS = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}


def find_pickle(folder: Path) -> Path | None:
    """The tokenizer.pkl of a model folder, or of its subfolder `tokenizer` (nanochat's layout); or None."""
    places = (folder / PICKLE_NAME, folder / "tokenizer" / PICKLE_NAME)
    return next((place for place in places if place.is_file()), None)


def read_encoding(file: Path) -> tiktoken.Encoding:
    """The encoding in a pickle of any protocol.

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
    reader = _Reader(content)
    try:
        _check_size(content)
        found = reader.load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle can fail with any error
        raise UserError(f"this is no pickle that can be read: {error_line(error)}") from error
    if not isinstance(found, reader.stand_in):
        raise UserError(f"expected tiktoken's Encoding, found a pickled {type(found).__name__}")
    return _checked(found.__dict__.get("state"))


def _check_size(content: bytes) -> None:
    """Raises UserError for a small pickle that creates something huge.

    It could do so by a memo of billions of places, or by nested tuples that are each used twice: hashing one
    with thirty levels takes minutes. So only plain values may be used again.
    """
    before = ""
    plain: dict[int, bool] = {}  # place in the memo -> whether its content is a plain value
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "MEMOIZE" or name in _PUTS:
            place = len(plain) if name == "MEMOIZE" else int(argument or 0)
            if place > len(content):
                raise UserError(f"the pickle asks for {place:,} places in a file of {len(content):,} bytes")
            plain[place] = before in _PLAIN
        elif name == "DUP" or (name in _GETS and not plain.get(int(argument or 0), True)):
            raise UserError("the pickle uses a tuple, list or dict twice, which no vocabulary needs to")
        before = name


class _Reader(pickle.Unpickler):
    """An unpickler with two names, whose stand-ins only keep data."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))

        # Made for each reading: BUILD may set attributes, which must be gone afterwards.
        class Encoding:
            """Keeps the state that the pickle gives it."""

            def __setstate__(self, state: object) -> None:
                self.__dict__["state"] = state

        def encode(text: str, encoding: str) -> bytes:
            """Bytes in the form of protocol 2: their values as characters."""
            if type(text) is not str or encoding != "latin1":
                raise UserError(f'_codecs.encode: expected "latin1", found {_shown(encoding)}')
            return text.encode("latin-1")

        self.stand_in = Encoding
        self._names = {("tiktoken.core", "Encoding"): Encoding, ("_codecs", "encode"): encode}
        # Extension codes seen earlier in this process would be read from this cache and bypass find_class.
        copyreg.clear_extension_cache()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The stand-in for a name; UserError for every other one, before anything is imported."""
        try:
            return self._names[module_name, global_name]
        except KeyError:
            raise UserError(
                f"the pickle asks for {show(f'{module_name}.{global_name}')}; only tiktoken's Encoding is "
                "admitted, as a pickle can run any code; none of this one was run"
            ) from None

    def persistent_load(self, pid: Any, /) -> Any:
        """A reference to something outside the file: refused."""
        raise UserError(f"the pickle refers to something outside it ({_shown(pid)}), which is not admitted")


def _shown(value: object) -> str:
    # A value made by the pickle may have any size, so only texts are shown.
    return show(value) if type(value) is str else type(value).__name__


def _checked(state: Any) -> dict[str, Any]:
    """The state, if it is a valid vocabulary; tiktoken itself accepts some that crash it later."""
    if type(state) is not dict:
        raise UserError(f"the Encoding's state: expected its vocabulary, found {_shown(state)}")
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
