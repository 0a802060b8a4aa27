"""What ranks tell each other: plain values as JSON and arrays, as bytes that contain no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from safetensors.numpy import load, save

from runners.errors import UserError
from runners.ranks.watchdog import EXIT_CODE

_HEAD = "message"  # the name of the plain part among the arrays


@attrs.frozen(eq=False)
class RankMessage:
    """One rank's message in an exchange."""

    where: str  # the exchange, such as "rollout"; all ranks have to be at the same one
    value: Any = None  # a plain JSON value
    arrays: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    error: str | None = None  # why the rank ends; None: it does not
    code: int = 0  # its exit code
    asked: int = 0  # the signal that has come to the rank; 0: none


class RankError(UserError):
    """Another rank's fault: it ends this one too. `reported`: rank 0 reports it for all."""

    exit_code = EXIT_CODE
    reported = False
    seen = False  # each rank has noticed it by itself, without an exchange


def encode_message(message: RankMessage) -> bytes:
    """The inverse of `decode_message`. TypeError for a value that JSON cannot hold."""
    plain = attrs.asdict(message, recurse=False, filter=lambda field, _: field.name != "arrays")
    arrays = {f"array {name}": np.ascontiguousarray(array) for name, array in message.arrays.items()}
    return save({_HEAD: np.frombuffer(json.dumps(plain).encode("ascii"), np.uint8), **arrays})


def decode_message(data: bytes) -> RankMessage:
    """The message from the bytes of `encode_message`."""
    arrays = load(data)
    plain = json.loads(arrays.pop(_HEAD).tobytes())
    return RankMessage(**plain, arrays={name.removeprefix("array "): a for name, a in arrays.items()})
