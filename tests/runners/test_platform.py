"""The machine: the BLAS is in force before MLX, missing parts are named with what installs them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runners import install_hints, platform

ROOT = Path(__file__).resolve().parents[2]
ON_LINUX_CPU = sys.platform == "linux" and platform.prepare().backend == "cpu"
linux_cpu = pytest.mark.skipif(not ON_LINUX_CPU, reason="Linux without a GPU only")
needs_blas = pytest.mark.skipif(platform.blas().library is None, reason="no OpenBLAS or MKL on this machine")


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a Python of its own, since a BLAS is loaded once in a process."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False
    )


def test_importing_platform_imports_no_mlx():
    """The module can be imported first: it leaves mlx alone until asked."""
    code = "import runners.platform, sys; print('mlx.core' in sys.modules, 'numpy' in sys.modules)"
    result = in_new_process(code)
    assert result.stdout.split() == ["False", "False"], result.stderr


@linux_cpu
@needs_blas
def test_blas_becomes_global_before_mlx_and_only_once():
    """After load_blas the process has cblas_sgemm in its global scope; a second call answers alike."""
    result = in_new_process(
        "import ctypes; from runners.platform import load_blas\n"
        "before = hasattr(ctypes.CDLL(None), 'cblas_sgemm')\n"
        "first = load_blas()\n"
        "print(before, hasattr(ctypes.CDLL(None), 'cblas_sgemm'), first is not None and first == load_blas())"
    )
    assert result.stdout.split() == ["False", "True", "True"], result.stderr


@linux_cpu
def test_blas_after_mlx_changes_nothing_and_says_so():
    """With mlx.core imported first no library is loaded, and a notice names the reason."""
    result = in_new_process(
        "import mlx.core\n"
        "from runners.platform import load_blas, prepare\n"
        "print(load_blas()); print(prepare().notices[0])"
    )
    first, notice = result.stdout.splitlines()
    assert first == "None"
    assert "imported before a BLAS could be loaded" in notice


@pytest.mark.parametrize("cuda", [False, True])
def test_a_cuda_build_gets_shorter_buffers_where_the_user_set_none(cuda, monkeypatch):
    """20 operations each; what stands in the environment stays, and other builds get nothing."""
    monkeypatch.setattr(platform, "_installed", lambda *names: cuda)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")  # and removed again after the test
    platform._shorten_buffers()
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER")
    platform._shorten_buffers()
    assert os.environ.get("MLX_MAX_OPS_PER_BUFFER") == ("20" if cuda else None)


@linux_cpu
def test_missing_blas_and_compiler_are_named_with_their_packages(monkeypatch, tmp_path):
    """On a bare machine the notices give the commands to type: BLAS first, then the compiler."""
    monkeypatch.setattr(platform, "_candidates", list)
    monkeypatch.setattr(platform, "_mapped_blas", lambda: None)
    monkeypatch.delitem(sys.modules, "mlx.core")  # as before its import
    monkeypatch.setattr(install_hints, "_of_distribution", lambda lines: lines["debian"])
    monkeypatch.setenv("PATH", str(tmp_path))
    found = platform.blas.__wrapped__()
    notices = platform._cpu_notices(found)
    assert found.library is None
    assert "apt-get install libopenblas0-pthread" in notices[0]
    assert "apt-get install g++" in notices[1]


@linux_cpu
def test_environment_can_forbid_and_misname_a_blas():
    """GRPO_FN_BLAS=none loads nothing and is no news; a library without BLAS in it is an error."""
    forbidden = in_new_process("from runners.platform import prepare; print(prepare())", GRPO_FN_BLAS="none")
    assert "blas=None" in forbidden.stdout and "matrix products" not in forbidden.stdout
    misnamed = in_new_process("from runners.platform import prepare; prepare()", GRPO_FN_BLAS="libm.so.6")
    assert "GRPO_FN_BLAS=libm.so.6" in misnamed.stderr.splitlines()[-1]


@linux_cpu
def test_mlx_without_a_backend_names_the_extras(tmp_path):
    """The mlx package alone, as pip installs it on Linux without an extra, leads to the three extras."""
    core = Path(importlib.util.find_spec("mlx.core").origin)
    lonely = tmp_path / "mlx"
    lonely.mkdir()
    (lonely / "__init__.py").write_text("")
    shutil.copyfile(core, lonely / core.name)  # without mlx/lib, which the backend's wheel brings
    result = in_new_process(
        "from runners.platform import prepare; prepare()", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"
    )
    message = result.stderr.splitlines()[-1]
    assert "UserError" in message and "libmlx" in message
    assert all(f"'.[{extra}]'" in message for extra in ("cpu", "cuda12", "cuda13"))


def test_mlx_not_installed_is_told_apart():
    """No mlx at all is another sentence than mlx without a backend."""
    error = ModuleNotFoundError("No module named 'mlx'")
    assert platform._explain_import(error).startswith("MLX is not installed")


@linux_cpu
def test_cpu_computes_in_float32_and_a_gpu_in_the_models_dtype():
    """The default dtype follows the backend."""
    assert platform.prepare().default_dtype == "float32"
    assert platform.Platform(backend="metal").default_dtype is None
    assert platform.Platform(backend="cuda").default_dtype is None


def test_memory_limit_and_readings():
    """A limit in GB reaches MLX as bytes; the readings see an array that lives, and the machine's total."""
    import mlx.core as mx

    before = mx.get_memory_limit()
    try:
        platform.prepare(memory_limit_gb=2.5)
        assert mx.get_memory_limit() == 2_500_000_000
    finally:
        mx.set_memory_limit(before)
    idle = platform.memory()
    array = mx.ones((1024, 1024))
    mx.eval(array)
    busy = platform.memory()
    assert busy.active - idle.active >= array.nbytes
    assert busy.peak >= busy.active
    assert busy.total > 10**9


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=ubuntu\nID_LIKE=debian\n", "apt-get"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper"),
        ("ID=somethingelse\n", "apt-get"),
    ],
)
def test_install_line_is_the_distributions_own(monkeypatch, tmp_path, release, command):
    """/etc/os-release chooses the package manager, by ID and then by what the distribution is like."""
    file = tmp_path / "os-release"
    file.write_text(release)
    monkeypatch.setattr(install_hints, "Path", lambda name: file)
    assert install_hints.blas().startswith(command)


@linux_cpu
def test_a_64_bit_blas_is_refused(monkeypatch):
    """A library that says it takes 64-bit integers would read garbage sizes from MLX."""

    class Ilp64:
        @staticmethod
        def cblas_sgemm(): ...

        @staticmethod
        def openblas_get_config():
            return b"OpenBLAS 0.3.21 USE64BITINT DYNAMIC_ARCH"

    opened = []
    monkeypatch.setattr(platform.ctypes, "CDLL", lambda name, **mode: opened.append(mode) or Ilp64)
    assert platform._load_global("libopenblas64.so") is False
    assert opened == [{}]  # looked at, never made global
