"""Programs that are compiled ahead: which, by whom, and what is left where something fails."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from grpo_fn.backends import disabled
from grpo_fn.backends.cuda.programs import compile_program, names
from runners.config.loading import load_config
from runners.machine.programs import gpu_programs
from runners.machine.programs.gpu_programs import (
    Compilation,
    compile_ahead,
    compile_early,
    keep_programs,
)

# In place of MLX: what each process is told to compile becomes a file, and the process's number is kept.
WRITES = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["MLX_PTX_CACHE_DIR"])
for name in sys.argv[1:]:
    (folder / f"{name}.txt").write_text(str(os.getpid()))
    (folder / f"{name}.ptx").write_text("code")
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_name_is_a_computation(dtype):
    """Each can be computed, here too, and names its dtype where it depends on it."""
    wanted = names(dtype)
    assert len(set(wanted)) == len(wanted) >= 14
    for name in wanted:
        compile_program(name)
    assert f"gather_{dtype}_uint32_1" in wanted


@pytest.mark.parametrize("name", ["", "gather", "sort_float32_int32_1", "gather_int32"])
def test_other_names_are_refused(name):
    """With what is wanted."""
    with pytest.raises(ValueError, match="expected one of names"):
        compile_program(name)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The user's cache; MLX's variable is not set, and is what it was afterwards."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpu_programs.tempfile, "tempdir", None)
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    ends = []
    monkeypatch.setattr(gpu_programs, "_at_exit", lambda *call: ends.append(call))
    yield tmp_path / "cache" / "gpu-programs" / "mlx-0.32.4-sm_90", ends
    os.environ.pop("MLX_PTX_CACHE_DIR", None)
    monkeypatch.setattr(gpu_programs.tempfile, "tempdir", None)


def process_of(code, **environment):
    """A Python process of its own that runs this code; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


START = """
import os, pathlib
from runners.machine.programs.gpu_programs import keep_programs
keep_programs("0.32.4", "sm_90")
folder = pathlib.Path(os.environ["MLX_PTX_CACHE_DIR"])
"""


def test_what_a_process_compiles_outlives_it(cache):
    """Each has a folder of its own, which begins with what others have left, and is gone afterwards."""
    kept, _ = cache
    write = START + "print(folder)\nfor end in 'ptx', 'txt', 'cu': (folder / f'gather.{end}').write_text(end)"
    own = process_of(write)
    assert {file.name: file.read_text() for file in kept.iterdir()} == {
        f"gather.{end}": end for end in ("ptx", "txt", "cu")
    }
    assert not Path(own).exists()
    assert process_of(START + "print((folder / 'gather.ptx').read_text())") == "ptx"


def test_programs_in_folders_are_kept_and_parts_of_one_are_not_taken(cache):
    """MLX cuts long names into folders; of a program whose code is not there yet nothing is copied."""
    kept, _ = cache
    (kept / "long").mkdir(parents=True)
    for name in ("long/name.ptx", "long/name.txt", "begun.txt", "begun.cu", ".x.part"):
        (kept / name).write_text(name)
    keep_programs("0.32.4", "sm_90")
    own = Path(os.environ["MLX_PTX_CACHE_DIR"])
    found = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
    assert found == {"long/name.ptx", "long/name.txt"}


def test_a_cache_that_cannot_be_read_or_written_is_no_fault(cache, monkeypatch):
    """The process has its own folder all the same, with what was compiled ahead; its end is quiet."""
    kept, ends = cache
    kept.parent.mkdir(parents=True)
    kept.touch()  # a file in the folder's place
    monkeypatch.setattr(gpu_programs, "_CODE", WRITES)
    keep_programs("0.32.4", "sm_90")
    own = Path(os.environ["MLX_PTX_CACHE_DIR"])
    with Compilation(own, ["a"], 1) as compilation:
        assert compilation.wait() == [] and (own / "a.ptx").exists()
    ((end, *arguments),) = ends
    end(*arguments)


def test_a_child_does_not_share_its_parents_folder(cache):
    """It inherits the variable, and would write where its parent reads."""
    keep_programs("0.32.4", "sm_90")
    own = os.environ["MLX_PTX_CACHE_DIR"]
    keep_programs("0.32.4", "sm_90")  # again, as each command does that asks for the platform
    assert os.environ["MLX_PTX_CACHE_DIR"] == own
    child = process_of(START + "print(folder)")
    assert child != own and Path(child).name.startswith(gpu_programs._PREFIX)


def refuse(*_, **__):
    """In place of what asks the disk for room."""
    raise OSError(28, "No space left on device")


def test_without_room_mlx_takes_its_own_folder(cache, monkeypatch):
    """A full disk: nothing is compiled ahead, and the run goes on."""
    monkeypatch.setattr(gpu_programs.tempfile, "TemporaryDirectory", refuse)
    keep_programs("0.32.4", "sm_90")
    assert "MLX_PTX_CACHE_DIR" not in os.environ
    with compile_ahead("cuda", "auto", 8 << 30, cores=2) as compilation:
        assert compilation.names == []


def test_what_is_compiled_ahead_is_kept_at_once(cache, monkeypatch):
    """In the process's folder and in the cache: a run that is killed later has not lost it."""
    kept, _ = cache
    monkeypatch.setattr(gpu_programs, "_CODE", WRITES)
    keep_programs("0.32.4", "sm_90")
    own = Path(os.environ["MLX_PTX_CACHE_DIR"])
    with Compilation(own, ["a"], 1) as compilation:
        assert compilation.wait() == []
    assert (own / "a.ptx").read_text() == (kept / "a.ptx").read_text() == "code"


def test_programs_are_compiled_side_by_side_and_once(monkeypatch, tmp_path):
    """Three processes for seven programs; a later run starts none."""
    monkeypatch.setattr(gpu_programs, "_CODE", WRITES)
    wanted = [f"program_{n}" for n in range(7)]
    with Compilation(tmp_path / "kept", wanted, 3) as compilation:
        assert compilation.wait() == []
    kept = tmp_path / "kept"
    assert {file.name for file in kept.iterdir()} == {f"{n}.{s}" for n in wanted for s in ("ptx", "txt")}
    assert len({file.read_text() for file in kept.glob("*.txt")}) == 3
    with Compilation(kept, wanted, 3) as compilation:
        assert compilation.names == [] and compilation.wait() == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (WRITES + "\nif 'b' in sys.argv: raise RuntimeError('no such GPU')", "RuntimeError: no such GPU"),
        (WRITES + "\nif 'b' in sys.argv: import time; time.sleep(600)", "it took more than 5 s"),
    ],
)
def test_a_process_that_fails_is_told_and_what_others_made_is_kept(monkeypatch, tmp_path, code, line):
    """The run goes on: MLX compiles when it needs it. No process is left."""
    monkeypatch.setattr(gpu_programs, "_CODE", code)
    monkeypatch.setattr(gpu_programs, "_SECONDS", 5)
    with Compilation(tmp_path, ["a", "b"], 2) as compilation:
        running = compilation._running
        assert compilation.wait() == [f"some GPU programs were not compiled ahead: {line}"]
    assert (tmp_path / "a.ptx").exists() and all(process.poll() is not None for process in running)


@pytest.mark.parametrize(("backend", "off"), [("cpu", ()), ("cuda", ("programs_ahead",))])
def test_nothing_is_compiled_ahead_elsewhere_or_where_it_is_turned_off(monkeypatch, tmp_path, backend, off):
    """No process, no folder."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_programs.subprocess, "Popen", lambda *a, **k: pytest.fail("a process"))
    with disabled(*off), compile_ahead(backend, "auto", 8 << 30, cores=2) as compilation:
        assert compilation.names == [] and compilation.wait() == []


@pytest.mark.skipif(mx.default_device() == mx.cpu, reason="wants CUDA")
def test_the_names_are_those_of_this_mlx(tmp_path):
    """What MLX leaves in its folder has the names that were predicted."""
    wanted = names("bfloat16")
    with Compilation(tmp_path, wanted, 8) as compilation:
        assert compilation.wait() == []
    assert {file.stem for file in tmp_path.glob("*.ptx")} >= set(wanted)


@pytest.mark.parametrize(
    ("backend", "changes", "starts"),
    [
        ("cuda", [], True),
        ("cuda", ["model.dtype=bfloat16", "model.path=org/name"], True),
        ("cuda", ["model.path=org/name"], False),  # its dtype is known later
        ("cuda", ['system.disable=["programs_ahead"]'], False),
        ("cpu", [], False),
    ],
)
def test_a_run_s_programs_begin_to_compile_before_anything_is_read(
    backend, changes, starts, monkeypatch, tmp_path
):
    """If the dtype is known; the processes end with the compilation."""
    monkeypatch.setattr(gpu_programs, "_CODE", "import time; time.sleep(600)")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((4,), mx.float16)})
    config = load_config("quickstart", [f"model.path={tmp_path}", *changes])
    found = compile_early(config, backend, 8 << 30, 2)
    assert (found is not None) == starts
    if found is not None:
        running = list(found._running)
        assert len(running) == 2 and all(process.poll() is None for process in running)
        del found
        gc.collect()
        assert all(process.poll() is not None for process in running)
