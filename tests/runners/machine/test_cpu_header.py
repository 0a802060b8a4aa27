"""The header of MLX's programs for a CPU: compiled once, found by g++, and nothing where it cannot be."""

import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from grpo_fn.backends import disabled
from runners.machine.programs import cpu_header
from runners.machine.programs.cpu_header import HEADER, compile_header, programs_folder
from runners.machine.startup import Platform

CPU = Platform("cpu", device="a device")
needs_gcc = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux"
)
COMPILES = """
import mlx.core as mx
f = mx.compile(lambda x: mx.exp(x) * 2 + 1)
with mx.stream(mx.cpu):
    print(f(mx.zeros((3,))).tolist())
"""


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """A temporary folder of its own, as a new machine's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_programs_lie_in_the_temporary_folder(empty, monkeypatch):
    version = importlib.metadata.version("mlx")
    assert programs_folder() == empty / "mlx" / version / "cpu"
    for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert programs_folder() == Path("/tmp/mlx") / version / "cpu"


@needs_gcc
def test_it_is_compiled_once_and_found(empty):
    """By the command that MLX gives, also where another g++ has left a file; nothing else stays."""
    whole = compile_header(CPU)
    assert whole is not None and compile_header(CPU) == whole  # it is being compiled
    other = whole.with_name("another")
    other.write_text("not one")
    until = time.monotonic() + 60
    while not whole.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert whole.stat().st_size > 1e6
    assert {path.name for path in programs_folder().iterdir()} == {"mlx"}
    source = programs_folder() / "program.cpp"
    source.write_text(f'#include "{HEADER}"\nextern "C" float one() {{ return 1; }}\n')
    include = Path(mx.__file__).parent / "include"
    command = ["g++", *cpu_header._OPTIONS, "-H", "-shared", f"-I{include}", source, "-o", empty / "one.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"! {whole}" in done.stderr  # g++'s mark for one that it has used
    made = whole.stat().st_mtime_ns
    assert compile_header(CPU) == whole and whole.stat().st_mtime_ns == made


@needs_gcc
def test_mlx_compiles_beside_it(empty):
    """A process of its own, as a process keeps the programs that it has."""
    compile_header(CPU)
    done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True)
    assert done.stdout == "[3.0, 3.0, 3.0]\n", done.stderr
    assert list(programs_folder().glob("*.so"))


def test_nothing_is_compiled_where_it_does_not_help(empty, monkeypatch):
    """Another backend, no g++, turned off, a folder that cannot be written."""
    assert compile_header(Platform("cuda", device="a device")) is None
    with disabled("programs_ahead"):
        assert compile_header(CPU) is None
    monkeypatch.setattr(cpu_header.shutil, "which", lambda name: None)
    assert compile_header(CPU) is None
    assert list(empty.iterdir()) == []


@needs_gcc
def test_a_folder_that_cannot_be_made_is_no_fault(empty):
    (empty / "mlx").write_text("a file")
    assert compile_header(CPU) is None
