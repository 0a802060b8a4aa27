"""CUDA programs are compiled in advance, once, by parallel processes; failures leave no damaged files."""

import gc
import os
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from grpo_fn.backends import disabled
from grpo_fn.backends.cuda.programs import compile_program, names
from runners.config.loading import load_config
from runners.machine.bounded_process import python_command
from runners.machine.programs import gpu_programs
from runners.machine.programs.gpu_programs import Compilation, compile_ahead, keep_programs

# Instead of compiling, each process writes a file per program, which contains the process's number.
WRITES = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["MLX_PTX_CACHE_DIR"])
for name in sys.argv[1:]:
    (folder / f"{name}.txt").write_text(str(os.getpid()))
    (folder / f"{name}.ptx").write_text("code")
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of programs in an empty user cache."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path))
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")  # and what it was afterwards
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    monkeypatch.setattr(gpu_programs, "_LOCKS", [])
    (tmp_path / "gpu-programs").mkdir()
    return tmp_path / "gpu-programs"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_name_is_a_computation(dtype):
    """Each named program can be computed here; names include the dtype if the program depends on it."""
    wanted = names(dtype)
    assert len(set(wanted)) == len(wanted) >= 14
    for name in wanted:
        compile_program(name)
    assert f"gather_{dtype}_uint32_1" in wanted


HOLDS = """
import os, sys
from runners.machine.programs.gpu_programs import keep_programs
keep_programs("0.32.4", "sm_90")
print(os.environ["MLX_PTX_CACHE_DIR"], flush=True)
sys.stdin.read()
"""


def started():
    """Starts a process that keeps its programs until its standard input closes; returns it and its folder."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(python_command(HOLDS), text=True, **pipes)
    return process, Path(process.stdout.readline().strip())


def write_program(folder, name, source="source"):
    """Writes a program like MLX: code, names, source. With None, MLX was killed before the source."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".ptx", f"code of {name}"), (".txt", "names"), (".cu", source)):
        if text is not None:
            (folder / f"{name}{suffix}").write_text(text)


def test_each_process_has_its_own_programs(cache):
    """Folders are named by version and GPU, and start with the other folders' programs. A killed process's
    folder is reused, and a child process gets its own."""
    (one, first), (two, second) = started(), started()
    assert first == cache / "mlx-0.32.4-sm_90-0" and second == cache / "mlx-0.32.4-sm_90-1"
    write_program(first, "a")
    write_program(second / "long", "b")
    write_program(first, "half", None)
    write_program(cache / "mlx-9-sm_90-0", "newer")
    two.kill()
    two.communicate()
    three, third = started()
    assert third == second
    assert {str(path.relative_to(third)) for path in third.rglob("*.ptx")} == {"a.ptx", "long/b.ptx"}
    assert (third / "a.ptx").read_text() == "code of a" and (third / "a.txt").read_text() == "names"
    one.communicate()
    keep_programs("0.32.4", "sm_90")
    keep_programs("9", "sm_100")
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(first)
    four, fourth = started()  # inherits this process's environment
    assert fourth == cache / "mlx-0.32.4-sm_90-2"
    for process in (three, four):
        process.communicate()
    assert not (first / "half.ptx").exists() and (first / "long" / "b.ptx").exists()


def test_a_setting_of_the_user_stays(cache, monkeypatch):
    """A user's own MLX_PTX_CACHE_DIR is kept, and the cache stays empty."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/of/the/user")
    keep_programs("0.32.4", "sm_90")
    assert os.environ["MLX_PTX_CACHE_DIR"] == "/of/the/user" and not [*cache.iterdir()]


def test_a_folder_that_cannot_be_made_is_no_fault(cache):
    """If the folder cannot be created, MLX keeps programs in the temporary folder."""
    (cache / "mlx-0.32.4-sm_90-0").touch()
    keep_programs("0.32.4", "sm_90")
    assert "MLX_PTX_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("source", [None, ""], ids=["killed", "full disk"])
def test_half_written_programs_are_compiled_again(cache, source):
    """Incomplete programs are deleted, because MLX would load them without a check."""
    kept = cache / "mlx-0.32.4-sm_90-0"
    write_program(kept, "whole")
    write_program(kept / "long", "whole")
    write_program(kept, "half", source)
    keep_programs("0.32.4", "sm_90")
    assert {str(path.relative_to(kept)) for path in kept.rglob("*.ptx")} == {"whole.ptx", "long/whole.ptx"}


def test_programs_are_compiled_side_by_side_and_once(monkeypatch, tmp_path):
    """Three processes compile seven programs; a later run starts no process."""
    monkeypatch.setattr(gpu_programs, "_CODE", WRITES)
    wanted = [f"program_{n}" for n in range(7)]
    Compilation(tmp_path / "kept", wanted, 3).wait()
    kept = tmp_path / "kept"
    assert {file.name for file in kept.iterdir()} == {f"{n}.{s}" for n in wanted for s in ("ptx", "txt")}
    assert len({file.read_text() for file in kept.glob("*.txt")}) == 3
    assert Compilation(kept, wanted, 3).names == []


@pytest.mark.parametrize("fault", ["raise RuntimeError('no such GPU')", "import time; time.sleep(600)"])
def test_a_process_that_fails_or_hangs_does_not_lose_the_others_programs(monkeypatch, tmp_path, fault):
    """The other processes' programs are kept, and no process is left."""
    monkeypatch.setattr(gpu_programs, "_CODE", f"{WRITES}\nif 'b' in sys.argv: {fault}")
    monkeypatch.setattr(gpu_programs, "_SECONDS", 2)
    compilation = Compilation(tmp_path, ["a", "b"], 2)
    running = [*compilation._running.values()]
    compilation.wait()
    assert [file.name for file in tmp_path.glob("*.ptx")] == ["a.ptx"]
    assert all(process.poll() is not None for process in running)


@pytest.mark.skipif(mx.default_device() == mx.cpu, reason="wants CUDA")
def test_the_names_are_those_of_this_mlx(tmp_path):
    """The files that MLX writes have the predicted names."""
    wanted = names("bfloat16")
    Compilation(tmp_path, wanted, 8).wait()
    assert {file.stem for file in tmp_path.glob("*.ptx")} >= set(wanted)


@pytest.mark.parametrize(
    ("backend", "changes", "off", "dtype"),
    [
        ("cuda", [], (), "float16"),
        ("cuda", ["model.dtype=float32"], (), "float32"),
        ("cuda", ["model.path=org/name"], (), "bfloat16"),  # assumed, because its dtype is not known yet
        ("cuda", ['system.disable=["programs_ahead"]'], (), None),
        ("cuda", [], ("programs_ahead",), None),
        ("cpu", [], (), None),
    ],
)
def test_a_run_s_programs_begin_to_compile_before_anything_is_read(
    backend, changes, off, dtype, monkeypatch, tmp_path
):
    """Compilation starts only on CUDA and if it is enabled; its processes end with it."""
    monkeypatch.setattr(gpu_programs, "_CODE", "import time; time.sleep(600)")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((4,), mx.float16)})
    config = load_config("quickstart", [f"model.path={tmp_path}", *changes])
    with disabled(*off):
        found = compile_ahead(config, backend, 8 << 30, 2)
    assert (found and found.names) == (dtype and list(names(dtype)))
    if found is not None:
        running = [*found._running.values()]
        assert len(running) == 2 and all(process.poll() is None for process in running)
        del found
        gc.collect()
        assert all(process.poll() is not None for process in running)
