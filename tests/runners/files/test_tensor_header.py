"""Headers of safetensors files: what MLX would take amiss is refused before it reads."""

import json
import struct

import mlx.core as mx
import pytest

from runners.errors import UserError
from runners.files.durable import load_arrays, save_arrays
from runners.files.tensor_header import check_header

DTYPES = (
    "bool_",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
)


def written(path, header, body=b"\0" * 64):
    """A file with a header given as JSON or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


def test_what_mlx_writes_is_taken(tmp_path):
    """Every dtype, 0-d and empty arrays, none at all, and metadata; an entry by hand as well."""
    arrays = {name: mx.ones((2, 3)).astype(getattr(mx, name)) for name in (*DTYPES, "float32", "complex64")}
    arrays |= {"scalar": mx.array(1.0), "empty": mx.zeros((0, 3))}
    for number, content in enumerate((arrays, {})):
        save_arrays(tmp_path / f"{number}.safetensors", content, {"format": "mlx"})
        check_header(tmp_path / f"{number}.safetensors")
    assert set(load_arrays(tmp_path / "0.safetensors")[0]) == set(arrays)
    check_header(written(tmp_path / "hand", entry()))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(shape=[65536] * 4, data_offsets=[0, 0]), "0 bytes, but its shape"),  # 2^64 elements
        (entry(shape=[-2, -2]), "wanted a list of int32 numbers"),
        (entry(shape=[2**32 + 4]), "wanted a list of int32 numbers"),
        (entry(shape=[2.0, 2]), "wanted a list of int32 numbers"),
        (entry(shape=[True, 4]), "wanted a list of int32 numbers"),
        (entry(shape="4"), "wanted a list of int32 numbers"),
        (entry(shape=[5]), "has 16 bytes, but its shape [5] in F32 takes 20"),
        (entry(data_offsets=[16, 0]), "lies from byte 16 to 0"),
        (entry(data_offsets=[-16, 0]), "wanted [begin, end]"),
        (entry(data_offsets=[0, 16, 32]), "wanted [begin, end]"),
        (entry(data_offsets=[56, 72]), "lies from byte 56 to 72 of 64"),
        (entry(data_offsets=[2**63, 2**63 + 16]), "lies from byte"),
        (entry(dtype="F4"), 'the dtype "F4", which MLX does not know'),
        (entry(dtype=["F32"]), "which MLX does not know"),
        ({"a": "x"}, 'is described by "x"'),
        ({"a": {"dtype": "F32"}}, "wanted dtype, shape and data_offsets"),
        ([], "its header is list"),
        (b"{", "its header is no JSON"),
        (b"\xff\xfe", "its header is no JSON"),
        (b"[" * 100_000, "its header is no JSON"),
    ],
    ids=lambda part: str(part)[:50],
)
def test_a_header_that_lies_is_refused(tmp_path, header, message):
    """One line with the tensor and what is wrong with it."""
    with pytest.raises(UserError) as caught:
        check_header(written(tmp_path / "x.safetensors", header))
    text = str(caught.value)
    assert message in text and "x.safetensors: cannot be read as safetensors: " in text and "\n" not in text


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\xff" * 8 + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_file_without_a_whole_header_is_refused(tmp_path, content):
    """Empty, shorter than the length's eight bytes, or than the header they promise."""
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="its header would have"):
        check_header(tmp_path / "x")
    with pytest.raises(UserError, match="No such file"):
        check_header(tmp_path / "none")
