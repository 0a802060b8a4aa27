"""Preparing a machine: missing packages are named with the command that installs them; memory is measured."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from grpo_fn.backends.cpu import blas
from runners.machine import startup
from runners.machine.memory_readings import (
    free_memory,
    memory_metrics,
    swap_limit,
    total_memory,
    usable_memory,
)
from tests.support.processes.new_process import ROOT, in_new_process

ON_LINUX_CPU = sys.platform == "linux" and startup.prepare().backend == "cpu"
linux_cpu = pytest.mark.skipif(not ON_LINUX_CPU, reason="Linux without a GPU only")


@pytest.mark.skipif(not ON_LINUX_CPU, reason="MLX for a CPU")
def test_a_rank_compiles_in_its_own_folder_and_leaves_temporary_files_where_they_were(tmp_path):
    code = (
        "import os, tempfile\nfrom runners.machine.startup import separate_programs\n"
        "separate_programs(2, os.environ)\nimport mlx.core as mx\n"
        "mx.eval(mx.compile(lambda x: mx.exp(x) + x)(mx.ones(3)))\nprint(tempfile.mkdtemp())"
    )
    made = in_new_process(code, TMPDIR=str(tmp_path)).strip()
    assert Path(made).parent == tmp_path
    assert {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*.so")} == {
        f"grpo-{os.getuid()}-rank-2"
    }


@pytest.mark.parametrize("cuda", [False, True])
def test_a_cuda_build_gets_smaller_buffers_where_the_user_set_none(cuda, monkeypatch):
    """20 operations and 100 MB each. Values in the environment are kept, and other builds are unchanged."""
    monkeypatch.setattr(startup, "installed_version", lambda name: "0.32.4" if cuda else None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "")  # and removed again after the test
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER")
    startup.load_blas()
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    assert os.environ.get("MLX_MAX_MB_PER_BUFFER") == ("100" if cuda else None)


@linux_cpu
def test_missing_blas_and_compiler_are_named_with_their_packages(monkeypatch, tmp_path):
    """The notices contain the commands that install them: first the BLAS, then the compiler."""
    monkeypatch.setattr(blas, "_candidates", list)
    monkeypatch.setattr(blas, "_global_blas", lambda: None)
    monkeypatch.delitem(sys.modules, "mlx.core")  # as before its import
    monkeypatch.delenv("GRPO_FN_BLAS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = blas._search()
    notices = startup._cpu_notices(found)
    assert found.library is None
    assert "apt-get install libopenblas0-pthread" in notices[0] and "apt-get install g++" in notices[1]


@linux_cpu
def test_mlx_without_a_backend_names_the_extras(tmp_path):
    """If only the mlx package is installed, as by pip on Linux without an extra, three extras are named."""
    core = Path(mx.__file__)
    lonely = tmp_path / "mlx"
    lonely.mkdir()
    (lonely / "__init__.py").write_text("")
    shutil.copyfile(core, lonely / core.name)  # without mlx/lib, which the backend's wheel brings
    code = "from runners.machine.startup import prepare\ntry: prepare()\nexcept Exception as e: print([e])"
    message = in_new_process(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "UserError" in message and "libmlx" in message
    assert all(f"'.[{extra}]'" in message for extra in ("cpu", "cuda12", "cuda13"))


def test_memory_limit_and_readings():
    """MLX's limit is set in bytes, and free and usable memory stay within it."""
    before = mx.get_memory_limit()
    try:
        startup.prepare(memory_limit_gb=2.5)
        assert mx.get_memory_limit() == 2_500_000_000
    finally:
        mx.set_memory_limit(before)
    array = mx.ones((1024, 1024))
    mx.eval(array)
    found, total = memory_metrics(), total_memory()
    assert 1e9 * found["memory/peak_gb"] >= 1e9 * found["memory/active_gb"] >= array.nbytes and total > 1e9
    assert 0 < free_memory(0.5) <= 5e8 and usable_memory(0.5) == 5e8 and free_memory() <= total


def test_on_a_mac_swap_is_limited_by_default(monkeypatch):
    """Half of the memory or of the free disk, which holds the swap; a limit in the config is kept."""
    assert swap_limit(0) == 0 and swap_limit(2.5) == 2.5e9
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    memory = total_memory()
    for free, limit in ((10 * memory, memory / 2), (memory // 4, memory // 4 / 2), (0, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert swap_limit(0) == limit and swap_limit(2.5) == 2.5e9


@pytest.mark.parametrize("left", ["", "1"])
def test_transformers_is_imported_without_pytorch(tmp_path, left):
    """PyTorch takes seconds to import. `import torch` itself works, and GRPO_FN_TORCH=1 allows the import."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.99.0"\n')
    (tmp_path / "torch-2.99.0.dist-info").mkdir()
    (tmp_path / "torch-2.99.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.99.0\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from runners.machine import startup; startup.prepare(); sys.stderr = sys.stdout\n"
        "from transformers.utils import is_torch_available\n"
        "found = is_torch_available(); import torch; print(found, torch.__version__)"
    )
    assert in_new_process(code, GRPO_FN_TORCH=left).split() == [str(bool(left)), "2.99.0"]
