"""The BLAS of a Linux CPU: `import grpo_fn` alone loads it, and numbers do not depend on who asked for it."""

import os
import subprocess
import sys
from typing import Any

import pytest

from grpo_fn.backends.cpu import blas, load_blas
from runners.machine import startup
from tests.support.processes.new_process import python

ON_LINUX_CPU = sys.platform == "linux" and startup.prepare().backend == "cpu"
linux_cpu = pytest.mark.skipif(not ON_LINUX_CPU, reason="Linux without a GPU only")
needs_blas = pytest.mark.skipif(load_blas().library is None, reason="no OpenBLAS or MKL on this machine")
IS_GLOBAL = "import ctypes; print(hasattr(ctypes.CDLL(None), 'cblas_sgemm'))\n"


def in_new_process(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a new Python process, since a process loads its BLAS once."""
    return python(*options, "-c", code, code=None, **environment)


@linux_cpu
@needs_blas
def test_importing_the_core_makes_a_blas_global_once():
    """After any first import of the core, MLX finds cblas_sgemm; a second call changes nothing."""
    result = in_new_process(
        f"{IS_GLOBAL}import grpo_fn.backends.cpu, grpo_fn.algorithm.loss\n{IS_GLOBAL}"
        "from grpo_fn.backends.cpu import load_blas\n"
        "print(load_blas().library is not None and load_blas() is load_blas())",
        *("-W", "error"),
    )
    assert result.stdout.split() == ["False", "True", "True"], result.stderr
    assert result.stderr == ""


class OldLibrary:
    """An OpenBLAS that does not know today's processors, and obeys the environment when initialized again."""

    def __init__(self, kernels=b"Prescott"):
        """It chose `kernels` when it was loaded."""
        self.kernels, self.asked = kernels, 0
        self.gotoblas_dynamic_quit = lambda: None
        self.openblas_get_corename = type("Function", (), {"__call__": lambda _: self.kernels})()

    def gotoblas_dynamic_init(self):
        """Chooses again."""
        self.asked += 1
        self.kernels = os.environ["OPENBLAS_CORETYPE"].encode()


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        ("sse2 avx avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl", b"SkylakeX"),
        ("sse2 avx avx2 fma avx512f", b"Haswell"),
        ("sse2 avx avx2 fma", b"Haswell"),
        ("sse2 avx", b"Prescott"),
        ("", b"Prescott"),
    ],
)
def test_a_processor_that_openblas_does_not_know_gets_its_fastest_kernels(flags, kernels, monkeypatch):
    """The newest kernels that the processor can run; the environment is unchanged."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(blas, "processor_flags", lambda: set(flags.split()))
    library: Any = OldLibrary()
    blas._choose_kernels(library)
    assert library.kernels == kernels and "OPENBLAS_CORETYPE" not in os.environ


@linux_cpu
def test_mlx_before_the_core_is_a_warning_with_the_remedy():
    """Nothing is loaded, and one warning at the import's line says what to do."""
    code = "import mlx.core\nimport grpo_fn\nfrom grpo_fn.algorithm import loss\n"
    code += "from runners.machine.startup import prepare\nprint(prepare().notices[0])"
    result = in_new_process(code)
    assert "mlx was imported before grpo_fn" in result.stdout
    assert result.stderr.count("Warning") == 1
    assert (
        "<string>:2: RuntimeWarning: mlx was imported before grpo_fn: import grpo_fn first" in result.stderr
    )


@linux_cpu
def test_no_warning_where_no_blas_is_wanted():
    """GRPO_FN_BLAS=none loads nothing and prints no warning."""
    code = (
        f"import mlx.core, grpo_fn\n{IS_GLOBAL}from runners.machine.startup import prepare; print(prepare())"
    )
    result = in_new_process(code, "-W", "error", GRPO_FN_BLAS="NONE")
    assert result.stdout.startswith("False"), result.stderr
    assert "blas=None" in result.stdout and "matrix products" not in result.stdout


@linux_cpu
def test_a_misnamed_blas_is_an_import_error_and_a_line_of_the_commands():
    """A library without BLAS is named; commands print one line."""
    core = in_new_process("import grpo_fn", GRPO_FN_BLAS="libm.so.6")
    last = core.stderr.splitlines()[-1]
    assert last.startswith("ImportError: GRPO_FN_BLAS=libm.so.6: expected a library with 32-bit cblas_sgemm")
    code = "from runners.cli import main; main(['run', 'quickstart'])"
    command = in_new_process(code, GRPO_FN_BLAS="libm.so.6")
    assert command.returncode == 2
    assert command.stderr.splitlines() == [last.removeprefix("ImportError: ")]


@linux_cpu
def test_a_64_bit_blas_is_refused(monkeypatch):
    """A library with 64-bit integers would read wrong sizes from MLX."""

    class Ilp64:
        @staticmethod
        def cblas_sgemm(): ...

        @staticmethod
        def openblas_get_config():
            return b"OpenBLAS 0.3.21 USE64BITINT DYNAMIC_ARCH"

    opened = []
    monkeypatch.setattr(blas.ctypes, "CDLL", lambda name, **mode: opened.append(mode) or Ilp64)
    assert blas._load_global("libopenblas64.so") is False
    assert opened == [{}]  # looked at, never made global
