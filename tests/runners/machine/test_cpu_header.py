"""The header of MLX's CPU programs is compiled once, where that helps, and g++ finds it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_fn.backends
from grpo_fn.backends import disabled
from runners.machine.programs import cpu_header
from runners.machine.programs.cpu_header import compile_header, programs_folder
from runners.machine.startup import Platform
from tests.support.processes.waiting import wait_until

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
    """An empty temporary folder, as on a new machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@needs_gcc
def test_it_is_compiled_once_and_found(empty):
    """MLX's compiler finds the header, even next to another g++'s file. No other file is left."""
    whole = compile_header(CPU)
    assert whole is not None
    whole.with_name("another").write_text("not one")
    wait_until(whole.exists)
    assert whole.stat().st_size > 1e6
    wait_until(lambda: [path.name for path in programs_folder().iterdir()] == ["mlx"])
    made = whole.stat().st_mtime_ns
    assert compile_header(CPU) == whole and whole.stat().st_mtime_ns == made

    tools, said = empty / "tools", empty / "said.txt"
    tools.mkdir()
    (tools / "g++").write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -H "$@" 2>>{said}\n')
    (tools / "g++").chmod(0o755)
    # in a new process, because a process keeps its compiled programs
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True)
    assert done.stdout == "[3.0, 3.0, 3.0]\n", done.stderr
    assert f"! {whole}" in said.read_text()  # g++'s mark for a header that it has used


@needs_gcc
def test_vectors_are_as_wide_as_the_processor_has_them(empty, monkeypatch):
    """Each kind of processor has its own file, which uses AVX2 only if the processor supports it."""
    texts, parts = [], set()

    def run(*_, env, **__):
        texts.append(Path(env["PART"] + ".h").read_text())
        parts.add(env["PART"])

    monkeypatch.setattr(cpu_header.subprocess, "run", run)
    files = set()
    for flags in (frozenset(), frozenset({"sse2", "avx2"})):
        monkeypatch.setattr(grpo_fn.backends, "processor_flags", lambda flags=flags: flags)
        files.add(compile_header(CPU))
    assert len(files) == 2 and ["avx2" in text for text in texts] == [False, True]
    compile_header(CPU)  # while the last one is being compiled: two compilers into one file would spoil it
    assert len(parts) == 3


def test_nothing_is_compiled_where_it_does_not_help(empty, monkeypatch):
    """Another backend, a disabled mechanism, and a missing g++."""
    assert compile_header(Platform("cuda", device="a device")) is None
    with disabled("programs_ahead"):
        assert compile_header(CPU) is None
    monkeypatch.setattr(cpu_header.shutil, "which", lambda name: None)
    assert compile_header(CPU) is None
    assert list(empty.iterdir()) == []
