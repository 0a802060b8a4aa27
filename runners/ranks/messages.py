"""Messages between ranks as bytes: plain values as JSON, and arrays beside them. They contain no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np


@attrs.frozen(eq=False)
class RankMessage:
    """One rank's message in an exchange."""

    where: str  # the exchange, such as "rollout"; all ranks have to be at the same one
    value: Any = None  # a plain JSON value
    arrays: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    error: str | None = None  # why the rank ends; None: it does not
    code: int = 0  # its exit code
    asked: int = 0  # the signal that has come to the rank; 0: none


def encode_message(message: RankMessage) -> bytes:
    """The inverse of `decode_message`. TypeError for a value that JSON cannot hold."""
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    head = {
        "where": message.where,
        "value": message.value,
        "error": message.error,
        "code": message.code,
        "asked": message.asked,
        "arrays": [[name, str(array.dtype), array.shape] for name, array in arrays.items()],
    }
    text = json.dumps(head).encode("ascii")
    return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for array in arrays.values())])


def decode_message(data: bytes) -> RankMessage:
    """The message from the bytes of `encode_message`."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:end])
    arrays = {}
    for name, dtype, shape in head.pop("arrays"):
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        arrays[name] = np.frombuffer(data[end : end + size], dtype).reshape(shape)
        end += size
    return RankMessage(arrays=arrays, **head)
