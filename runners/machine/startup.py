"""Prepares the machine for a run: its BLAS, its MLX backend, and its memory.

Importing this module is fast. `prepare` imports grpo_fn, which loads the BLAS, and then MLX.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from runners.errors import UserError
from runners.files.own_folder import foreign, own_folder
from runners.machine.memory_readings import total_memory
from runners.machine.programs.gpu_programs import Compilation, compile_ahead, keep_programs
from runners.machine.versions import install_hint, installed_version

if TYPE_CHECKING:
    from grpo_fn.backends import Blas
    from runners.config.loading import Config

_CUDA_WHEELS = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")

# MLX submits operations to a CUDA device in buffers, at most ten ahead, and holds their outputs
# from then on. Smaller buffers hold less memory at the same speed, and a rollout's buffers are launched
# sooner. The numbers are operations in a buffer, and units of 10^6 bytes that they read and write.
_CUDA_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "20", "MLX_MAX_MB_PER_BUFFER": "100"}


@attrs.frozen
class Platform:
    """The platform on which a run computes.

    `notices` are messages to show once, most important first.
    """

    backend: str  # "metal" | "cuda" | "cpu"
    blas: str | None = None
    device: str = ""
    cores: int = 1  # number of cores that this process may use
    notices: tuple[str, ...] = ()
    programs: Compilation | None = None  # programs compiled in advance for the run

    def arithmetic(self) -> dict[str, Any]:
        """Returns facts about the platform. If these are equal on two machines, the same
        computation has bit-identical results on both.
        """
        found = {"mlx": installed_version("mlx"), "backend": self.backend, "device": self.device}
        if self.backend != "cpu":
            return found
        return found | {
            "blas": self.blas,
            "cores": self.cores,
            "processor": platform.processor() or platform.machine(),
        }


def load_blas() -> Blas:
    """Imports grpo_fn, which loads the BLAS before MLX. For CUDA, sets up MLX first.

    Raises ImportError if MLX is not installed or has no backend, or if GRPO_FN_BLAS in the
    environment does not name a BLAS.
    """
    if sys.platform == "linux" and any(map(installed_version, _CUDA_WHEELS)):
        for name, value in _CUDA_BUFFERS.items():  # MLX reads them at its first operation
            os.environ.setdefault(name, value)
    from grpo_fn.backends import load_blas

    return load_blas()


def separate_programs(rank: int, environ: MutableMapping[str, str]) -> None:
    """Sets the folder for the programs that MLX compiles for a CPU. The folder belongs to this user
    and rank, and is kept between runs.

    MLX loads programs from the temporary folder regardless of who wrote them, and writes them in
    place, so ranks that start at the same time could load an incomplete program. Python's own
    temporary files are not moved. This function must be called before MLX compiles. Raises
    UserError if another user has created the folder.
    """
    shared = Path(tempfile.gettempdir())
    with suppress(OSError):
        if not rank and not foreign(Path(environ.get("TMPDIR") or shared)):
            return
    with suppress(OSError):  # no space for the folder: MLX cannot compile either
        environ["TMPDIR"] = str(own_folder(shared / f"grpo-{os.getuid()}-rank-{rank}"))


def prepare(memory_limit_gb: float = 0.0, config: Config | None = None) -> Platform:
    """Loads the BLAS, imports MLX, determines its backend and sets its memory limit. The limit is
    in units of 10^9 bytes; 0 keeps the default.

    If `config` is given, starts compiling the GPU programs for its run.

    Raises UserError if MLX is not installed or has no backend, and in a process that was forked
    from one that has already computed with MLX.
    """
    separate_programs(0, os.environ)
    try:
        found = load_blas()

        import mlx.core as mx

        from grpo_fn.process_check import fork_problem
    except ImportError as error:
        raise UserError(_explain_import(error)) from error
    problem = fork_problem()
    if problem:
        raise UserError(problem)
    if memory_limit_gb > 0:
        mx.set_memory_limit(int(memory_limit_gb * 1e9))
    backend = "cpu"
    notices = ()
    info = mx.device_info()
    if mx.default_device().type == mx.DeviceType.gpu:
        backend = "metal" if mx.metal.is_available() else "cuda"
    elif sys.platform == "linux":
        notices = _cpu_notices(found)
    if backend == "cuda":
        keep_programs(installed_version("mlx") or "", str(info.get("architecture", "")))
    device = str(info.get("device_name", "")) or backend
    mac = sys.platform == "darwin"  # processes cannot be bound to cores there
    cores = (os.cpu_count() or 1) if mac else len(os.sched_getaffinity(0))
    programs = config and compile_ahead(config, backend, total_memory(), cores)
    import_transformers_without_torch()
    return Platform(backend, found.library, device, cores, notices, programs)


def import_transformers_without_torch() -> None:
    """Prevents transformers from importing PyTorch, which would take seconds and is not used here.

    `import torch` itself still works. If GRPO_FN_TORCH=1 is set in the environment, transformers
    may import PyTorch, for a custom loader that uses its PyTorch models.
    """
    if os.environ.get("GRPO_FN_TORCH") == "1":
        return
    # hides "PyTorch was not found", as mlx-lm does
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if {"torch", "transformers"} & sys.modules.keys() or not find_spec("torch"):
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import fails
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # caches its result
    finally:
        del sys.modules["torch"]


def _cpu_notices(found: Blas) -> tuple[str, ...]:
    lines = []
    if found.library is None and found.reason != "GRPO_FN_BLAS=none":
        package = "; apt-get install libopenblas0-pthread, or a similar package"
        hint = "" if "imported" in found.reason else package
        lines.append(f"matrix products are about 30x slower than necessary: {found.reason}{hint}")
    if shutil.which("g++") is None:
        lines.append(
            "g++ is not installed, so steps run without compilation; install it, for example with "
            "`apt-get install g++`"
        )
    return tuple(lines)


def _explain_import(error: ImportError) -> str:
    install = install_hint("cpu", "cuda12", "cuda13")
    if error.name == "GRPO_FN_BLAS":
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "mlx").startswith("mlx"):
        return f"MLX is not installed ({error}): {install}"
    if "libmlx" in str(error):
        return f"MLX is installed without a backend ({error}): {install}"
    return f"MLX cannot be imported: {error}"
