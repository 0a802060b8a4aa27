"""Encodes messages between ranks. Plain values are encoded as JSON and arrays as their bytes, so a
message contains no code.
"""

import json
from typing import Any

import attrs
import numpy as np
from safetensors.numpy import load, save

from runners.errors import UserError
from runners.ranks.watchdog import EXIT_CODE

_TEXT = "message"  # the plain part's name among the arrays
_ARRAY = "\0array"  # the key of an array in the plain part


@attrs.frozen(eq=False)
class RankMessage:
    """One rank's message in an exchange."""

    where: str  # the exchange, such as "rollout"; the same on all ranks
    value: Any = None  # a plain JSON value that may contain arrays
    error: str | None = None  # why the rank ends; None: the rank continues
    code: int = 0  # the rank's exit code
    asked: int = 0  # the signal that the rank has received; 0: none


class RankError(UserError):
    """Another rank's failure, which also ends this rank. `reported` is True if another rank reports
    the failure.
    """

    exit_code = EXIT_CODE
    reported = False
    seen = False  # whether each rank has detected the failure by itself


def encode_message(message: RankMessage) -> bytes:
    """Encodes a message for `decode_message`, which returns tuples as lists and MLX arrays as NumPy
    arrays.

    Raises TypeError for a value that JSON cannot represent.
    """
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any) -> Any:
        if not hasattr(value, "dtype"):
            raise TypeError(f"expected plain values and arrays, found {type(value).__name__}")
        found = np.array(value, order="C")
        if found.ndim == 0:
            return found.item()
        arrays[str(len(arrays))] = found
        return {_ARRAY: str(len(arrays) - 1)}

    text = json.dumps(attrs.asdict(message, recurse=False), default=plain)
    return save({_TEXT: np.frombuffer(text.encode("ascii"), np.uint8), **arrays})


def decode_message(data: bytes) -> RankMessage:
    """Decodes a message from the result of `encode_message`."""
    arrays = load(data)
    text = arrays.pop(_TEXT).tobytes()
    return RankMessage(
        **json.loads(text, object_hook=lambda x: arrays[x[_ARRAY]] if {*x} == {_ARRAY} else x)
    )
