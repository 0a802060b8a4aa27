"""Hostile GGUF files are refused in one line, with little time and memory."""

import os
import re
import struct
import subprocess
import sys

import pytest

from runners.conversion.gguf.header import read_header
from runners.errors import UserError
from tests.support.gguf_files import LLAMA, TENSORS, write
from tests.support.pages import ROOT

MANY = struct.pack("<IIQ", 9, 8, 10**9)


def llama(key, value):
    return {"metadata": LLAMA | {key: value}}


def tensors(**shapes):
    return {"tensors": TENSORS | {f"{name}.weight": shape for name, shape in shapes.items()}}


HOSTILE = {  # the fault -> arguments of `write`, and a pattern of the message
    "nothing": ({"size": 0}, "cannot be read as GGUF"),
    "10⁹ tokens": (llama("tokenizer.ggml.tokens", MANY), "truncated"),
    "10⁹ empty tokens, as a hole": (
        {"metadata": {"tokenizer.ggml.tokens": MANY}, "tensors": {}, "size": 8 * 10**9 + 100},
        "at most 2,097,152 texts and numbers",
    ),
    "10⁹ entries": ({"counts": (10**9, 10**9)}, "truncated"),
    "10⁹ empty entries, as a hole": (
        {"metadata": {}, "tensors": {}, "counts": (0, 10**9), "size": 8 * 10**9}, "at most 2,097,152"
    ),
    "a long name": ({"metadata": {"x": struct.pack("<IQ", 8, 2**63)}}, "truncated"),
    "arrays in arrays": (
        {"metadata": {"x": struct.pack("<IIQ", 9, 9, 1) * 1000}}, "array of numbers or texts"
    ),
    "truncated": ({"size": 700}, "truncated"),
    "lacking weights": ({"size": 6000}, "after the end of the file"),
    "overlapping": ({"offsets": {"blk.0.ffn_up.weight": 0}}, "overlaps another"),
    "10⁹ rows": (tensors(token_embd=(32, 10**9)), "after the end of the file"),
    "wrapping sizes": (tensors(token_embd=(2**31, 2**31, 4, 4)), "expected a shape"),
    "10⁹ blocks": (llama("llama.block_count", 10**9), "block_count"),
    "10⁹ wide": (llama("llama.feed_forward_length", 10**9), "ffn_down|up_proj|gate_proj|shape"),
    "no heads": (llama("llama.attention.head_count", 0), "at least one head"),
    "not a number": (
        llama("llama.attention.layer_norm_rms_epsilon", float("nan")), "expected a finite number, found nan"
    ),
    "a type without numbers": ({"kind": 24}, "Dequantization for I8"),
    "an unknown type": ({"kind": 99}, "99 is not a valid"),
    "a name with ../": ({"tensors": {"../../x.weight": (32,), **TENSORS}}, "no tensor"),
    "another architecture": (llama("general.architecture", "mamba"), 'found "mamba"'),
    "a missing tensor": (
        {"tensors": {name: TENSORS[name] for name in TENSORS if "ffn_up" not in name}}, "ffn_up|up_proj"
    ),
    "an end beyond the tokens": (llama("tokenizer.ggml.eos_token_id", 7), "token 7 is not among the 4"),
    "a text for a number": (llama("llama.context_length", "long"), "context_length: expected int"),
    "merges of one part": (llama("tokenizer.ggml.merges", ["ab"]), "two parts"),
    "a number for types": (llama("tokenizer.ggml.token_type", 3), "token_type: expected 4 finite numbers"),
    "texts for types": (llama("tokenizer.ggml.token_type", ["a"] * 4), "token_type: expected 4 finite"),
    "2³¹ heads": (llama("llama.attention.head_count", struct.pack("<IQ", 10, 2**31)), "a 31-bit number"),
    "another cutting": (llama("tokenizer.ggml.pre", "../x"), "tokenizer.ggml.pre: expected"),
}  # fmt: skip


def test_hostile_files_end_with_a_line(tmp_path):
    """Each needs at most 5 s of processor time and 1 GB of additional memory, and leaves no files."""
    for number, (content, _) in enumerate(HOSTILE.values()):
        write(tmp_path / f"{number}.gguf", **content)
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from click.testing import CliRunner
from runners import cli
import runners.conversion.convert, transformers, mlx_lm.tokenizer_utils, mlx_lm.models.llama, mlx_lm.utils
own = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (own + (1 << 30),) * 2)
used = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
for number in range({len(HOSTILE)}):
    before = used()
    done = CliRunner().invoke(cli.main, ["convert", f"{{number}}.gguf", "--out", "out"])
    assert done.exit_code == 2 and done.stderr.count("\\n") == 1, (number, done.output, done.exception)
    print(done.stderr, end="")
    assert used() - before < 5, number
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for (kind, (_, want)), found in zip(HOSTILE.items(), done.stdout.splitlines(), strict=True):
        assert re.search(want, found), (kind, found)
    assert all(path.suffix == ".gguf" for path in tmp_path.iterdir())


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match="there is no such file"):
        read_header(tmp_path / "pipe.gguf")
