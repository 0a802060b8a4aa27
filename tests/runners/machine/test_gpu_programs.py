"""Programs that are compiled ahead: which, by whom, and what is left where something fails."""

import os
from pathlib import Path

import mlx.core as mx
import pytest

from grpo_fn.backends import disabled
from grpo_fn.backends.cuda.programs import compile_program, names
from runners.machine.programs import gpu_programs
from runners.machine.programs.gpu_programs import Compilation, compile_ahead, keep_programs
from runners.machine.startup import Platform

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
    with pytest.raises(ValueError, match="wanted one of names"):
        compile_program(name)


def test_the_folder_outlives_the_process_and_the_users_stays(monkeypatch, tmp_path):
    """One for each version and architecture, in the user's cache."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path))
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    assert keep_programs("0.32.4", "sm_90") == tmp_path / "programs" / "mlx-0.32.4-sm_90"
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(tmp_path / "programs" / "mlx-0.32.4-sm_90")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/mine")
    assert keep_programs("0.32.4", "sm_90") == Path("/mine")


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


def test_a_name_that_this_mlx_does_not_use_is_tried_once(monkeypatch, tmp_path):
    """Its program came out under another name."""
    monkeypatch.setattr(gpu_programs, "_CODE", WRITES.replace("in sys.argv[1:]", "in ['other']"))
    with Compilation(tmp_path, ["gather"], 2) as compilation:
        assert compilation.wait() == []
    assert Compilation(tmp_path, ["gather"], 2).names == []


def test_a_process_that_fails_is_told_and_what_others_made_is_kept(monkeypatch, tmp_path):
    """The run goes on: MLX compiles when it needs it."""
    monkeypatch.setattr(
        gpu_programs, "_CODE", WRITES + "\nif 'b' in sys.argv: raise RuntimeError('no such GPU')"
    )
    with Compilation(tmp_path, ["a", "b"], 2) as compilation:
        (line,) = compilation.wait()
    assert line == "GPU programs were not all compiled ahead: RuntimeError: no such GPU"
    assert (tmp_path / "a.ptx").exists()


def test_a_program_whose_process_failed_is_tried_again(monkeypatch, tmp_path):
    """It is not taken for one that this MLX does not know, whatever others made."""
    code = WRITES.replace("in sys.argv[1:]", "in sys.argv[1:] if 'b' not in sys.argv else 1 // 0")
    monkeypatch.setattr(gpu_programs, "_CODE", code)
    with Compilation(tmp_path, ["a", "b"], 2) as compilation:
        assert len(compilation.wait()) == 1
    assert Compilation(tmp_path, ["a", "b"], 0).names == ["b"]


def test_processes_that_cannot_be_started_are_a_line(monkeypatch, tmp_path):
    """A full /tmp, or a limit on processes: the run goes on."""

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpu_programs.subprocess, "Popen", refuse)
    with Compilation(tmp_path, ["a"], 1) as compilation:
        assert compilation.wait() == ["GPU programs were not all compiled ahead: No space left on device"]


def test_what_takes_too_long_is_ended(monkeypatch, tmp_path):
    """With a line; no process is left."""
    monkeypatch.setattr(gpu_programs, "_CODE", "import time; time.sleep(600)")
    monkeypatch.setattr(gpu_programs, "_SECONDS", 0.2)
    with Compilation(tmp_path, ["a"], 1) as compilation:
        ((process, _),) = compilation._running
        (line,) = compilation.wait()
    assert "more than 0.2 s" in line and process.poll() is not None


def test_other_backends_compile_nothing_ahead():
    """No process, no folder."""
    with compile_ahead(Platform(backend="cpu"), "auto", 8 << 30) as compilation:
        assert compilation.names == [] and compilation.wait() == []


def test_compiling_ahead_can_be_turned_off(monkeypatch, tmp_path):
    """`programs_ahead`: no process starts."""
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_programs.subprocess, "Popen", lambda *a, **k: pytest.fail("a process"))
    with (
        disabled("programs_ahead"),
        compile_ahead(Platform(backend="cuda", cores=2), "auto", 8 << 30) as compilation,
    ):
        assert compilation.names == []


@pytest.mark.skipif(mx.default_device() == mx.cpu, reason="wants CUDA")
def test_the_names_are_those_of_this_mlx(tmp_path):
    """What MLX leaves in its folder has the names that were predicted."""
    wanted = names("bfloat16")
    with Compilation(tmp_path, wanted, 8) as compilation:
        assert compilation.wait() == []
    assert {file.stem for file in tmp_path.glob("*.ptx")} >= set(wanted)
