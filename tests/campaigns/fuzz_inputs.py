"""What the campaign of `fuzz.py` makes its inputs of: any JSON, mutated files, changed values."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["../x", "/etc/passwd", "\x1b[31m", "\ud800", "F32", "model.safetensors", "a" * 300])
    | st.sampled_from([10**400, -(10**400), "1e999"])
    | st.sampled_from([20, 300]).map(lambda depth: json.loads("[" * depth + "]" * depth)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: Any, valid: list[bytes]) -> bytes:
    """A valid file with a few bytes overwritten, cut out, put in, doubled, or the end cut off."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        # Most of what a parser minds stands at the beginning.
        end = min(len(data), draw(st.sampled_from([16, 200, 3000, len(data)])))
        place = draw(st.integers(0, end))
        width = draw(st.integers(1, 8))
        new = draw(
            st.binary(min_size=1, max_size=6) | st.sampled_from([b"\xff" * 4, b'"', b"[", b"{", b"-1", b"\0"])
        )
        match draw(st.sampled_from(["over", "cut", "in", "twice", "end"])):
            case "over":
                data[place : place + len(new)] = new
            case "cut":
                del data[place : place + width]
            case "in":
                data[place:place] = new
            case "twice":
                data[place:place] = data[place : place + width * 20]
            case "end":
                del data[place:]
    return bytes(data)


def changed_json(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value in which one place, at any depth, is replaced by any other value, or left out."""
    if isinstance(value, dict) and value:
        inner = st.sampled_from(sorted(value)).flatmap(
            lambda key: changed_json(value[key]).map(lambda new: {**value, key: new})
        )
        less = st.sampled_from(sorted(value)).map(lambda key: {k: v for k, v in value.items() if k != key})
        more = st.tuples(st.text(max_size=5), JSON).map(lambda pair: {**value, pair[0]: pair[1]})
        return inner | less | more | JSON
    if isinstance(value, list) and value:
        inner = st.integers(0, min(len(value), 5) - 1).flatmap(
            lambda i: changed_json(value[i]).map(lambda new: [*value[:i], new, *value[i + 1 :]])
        )
        return inner | JSON
    return JSON


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


class Target:
    """One kind of file: what is fed, and what reads it."""

    patience = 1  # times five seconds for an input

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def inputs(self) -> st.SearchStrategy[Any]:
        """Valid ones changed, and invented ones."""
        raise NotImplementedError

    def feed(self, value: Any) -> None:
        """Writes the input into the folder and reads it."""
        raise NotImplementedError

    def warm(self) -> None:
        """Reads a valid file: imports write caches, which is nothing that an input did."""


class FolderTarget(Target):
    """One file of the sound folder `self.place` replaced; inputs are (name, content)."""

    place: Path

    def keep(self) -> None:
        """Notes what belongs into the folder."""
        self.kept = {path.name: path.read_bytes() for path in self.place.iterdir() if path.is_file()}

    def feed(self, value: tuple[str, bytes]) -> None:
        name, content = value
        (self.place / name).write_bytes(content)
        try:
            self.read()
        finally:
            (self.place / name).unlink()
            if name in self.kept:
                (self.place / name).write_bytes(self.kept[name])

    def read(self) -> None:
        """Reads the folder."""
        raise NotImplementedError

    def warm(self) -> None:
        name = next(iter(self.kept))
        self.feed((name, self.kept[name]))

    def changed(self, name: str, value: Any) -> st.SearchStrategy[Any]:
        """The file as JSON, with one place of `value` changed."""
        return st.tuples(st.just(name), changed_json(value).map(dumped))

    def mutated(self, name: str, *more: bytes) -> st.SearchStrategy[Any]:
        """The file with some bytes changed."""
        return st.tuples(st.just(name), mutated([*more] or [self.kept[name]]))

    def header(self, name: str) -> tuple[dict[str, Any], bytes]:
        """The header of a safetensors file, and what is behind it."""
        content = self.kept[name]
        (length,) = struct.unpack("<Q", content[:8])
        return json.loads(content[8 : 8 + length]), content[8 + length :]

    def few_changed(self, name: str) -> st.SearchStrategy[Any]:
        """A safetensors file with one place of its header's first two entries changed."""
        header, body = self.header(name)
        few = {key: header[key] for key in list(header)[:2]}
        whole = changed_json(few).map(lambda part: {**header, **part} if isinstance(part, dict) else part)
        return st.tuples(st.just(name), whole.map(lambda changed: packed(changed, body)))


def packed(header: Any, body: bytes) -> bytes:
    """A safetensors file."""
    text = dumped(header)
    return struct.pack("<Q", len(text)) + text + body
