"""Headers of safetensors files are checked before MLX reads them."""

import json
import os
import struct

import mlx.core as mx
import pytest

from runners.errors import UserError
from runners.files.tensor_files import check_header, load_arrays, save_arrays, stated_dtype

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = (*INTEGERS, "bool_", "float16", "bfloat16", "float32", "complex64")


def written(path, header, body=b"\0" * 16):
    """A file with a header given as JSON or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


def test_what_mlx_writes_is_taken(tmp_path):
    """Files with every dtype, 0-d and empty arrays, no array, and metadata, and a hand-made header."""
    arrays = {name: mx.ones((2, 3)).astype(getattr(mx, name)) for name in DTYPES}
    arrays |= {"scalar": mx.array(1.0), "empty": mx.zeros((0, 3))}
    for number, content in enumerate((arrays, {})):
        save_arrays(tmp_path / f"{number}.safetensors", content, {"format": "mlx"})
        check_header(tmp_path / f"{number}.safetensors")
    assert set(load_arrays(tmp_path / "0.safetensors")[0]) == set(arrays)
    check_header(written(tmp_path / "hand", entry()))


@pytest.mark.parametrize(
    "header",
    [
        *(entry(shape=shape) for shape in ([-2, -2], [2**32 + 4], [2.0, 2], "4", [5])),
        entry(shape=[65536] * 4, data_offsets=[0, 0]),  # 2^64 elements
        *(entry(data_offsets=at) for at in ([16, 0], [-16, 0], [56, 72], [2**63, 2**63 + 16])),
        entry(dtype="X4"), {"a": "x"}, {"a": {"dtype": "F32"}}, [], b"{", b"\xff\xfe", b"[" * 100_000,
    ],
    ids=lambda part: str(part)[:50],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path, header):
    """One line names the file."""
    body = b"" if isinstance(header, dict) and "[0, 0]" in str(header) else b"\0" * 16
    with pytest.raises(UserError, match=r"x.safetensors: cannot be read as safetensors: [^\n]+$"):
        check_header(written(tmp_path / "x.safetensors", header, body))


def test_what_is_no_file_is_refused(tmp_path):
    """A short file, a folder, a missing file, and a named pipe, which would block."""
    (tmp_path / "short").write_bytes(b"\0" * 7)
    os.mkfifo(tmp_path / "pipe")
    for name in ("short", "", "none", "pipe"):
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            check_header(tmp_path / name)


@pytest.mark.parametrize(
    ("leaves", "dtype"),
    [
        ({"a": mx.zeros((4,), mx.float16), "b": mx.zeros((2,), mx.float16), "c": mx.zeros((9,))}, "float16"),
        ({"a": mx.zeros((4,), mx.uint32), "b": mx.zeros((2,), mx.bfloat16)}, "bfloat16"),
        ({"a": mx.zeros((4,), mx.int32)}, ""),
    ],
)
def test_the_headers_state_the_dtype_of_most_tensors(leaves, dtype, tmp_path):
    """Integers, such as packed weights, do not count; an unreadable folder states nothing."""
    mx.save_safetensors(str(tmp_path / "model.safetensors"), leaves)
    assert stated_dtype(tmp_path) == dtype and stated_dtype(tmp_path / "absent") == ""
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert stated_dtype(tmp_path) == ""
