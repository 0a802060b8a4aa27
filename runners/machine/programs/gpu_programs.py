"""MLX's compiled CUDA programs: kept in the user's cache folder, and compiled ahead by parallel processes.

Importing this module does not import MLX.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runners.errors import UserError
from runners.files.cache_folder import kept_folder
from runners.files.tensor_files import stated_dtype
from runners.machine.bounded_process import python_command

if TYPE_CHECKING:
    from runners.config.loading import Config

_VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads it when it compiles for the first time
_SECONDS = 120  # for all of them; MLX compiles the missing ones later, when it needs them
_CODE = "from grpo_fn.backends import compile_cuda_program as compiled; [*map(compiled, sys.argv[1:])]"


def keep_programs(mlx_version: str, architecture: str) -> None:
    """Sets the folder of the user's cache where MLX keeps its compiled programs; a setting of the user stays.

    Each version and each GPU has its own, because home folders may be shared, and each rank: MLX writes
    programs in place, and ranks compile the same ones at the same time. What a process that was killed has
    left half-written would end every later run: MLX writes a program's source last.
    """
    if os.environ.get(_VARIABLE):
        return
    rank = os.environ.get("MLX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    name = f"mlx-{mlx_version}-{architecture or 'gpu'}-rank-{rank}"
    with suppress(OSError, UserError):  # MLX then keeps programs in the temporary folder
        folder = kept_folder("gpu-programs", name)
        os.environ[_VARIABLE] = str(folder)
        for code in folder.rglob("*.ptx"):
            source = code.with_suffix(".cu")
            if not source.exists() or source.stat().st_size == 0:
                code.unlink()


def compile_ahead(config: Config, backend: str, memory: int, cores: int) -> Compilation | None:
    """Starts to compile the programs of a run, before anything of it is read; only on CUDA.

    A model whose dtype is not known yet is taken to be bfloat16: MLX compiles the others when it needs them.
    Each process needs one of the `cores` and about a gigabyte of the GPU's `memory` (bytes). They end with
    this process, or with the compilation.
    """
    from grpo_fn.backends import cuda_programs, enabled

    folder, dtype = os.environ.get(_VARIABLE, ""), config.model.dtype
    off = "programs_ahead" in config.system.disable or not enabled("programs_ahead")
    if backend != "cuda" or not folder or off:
        return None
    if dtype == "auto":
        dtype = stated_dtype(Path(config.model.path).expanduser()) or "bfloat16"
    with suppress(OSError):  # no space, or too many processes: MLX compiles them when it needs them
        return Compilation(Path(folder), cuda_programs(dtype), max(min(cores, memory >> 32), 1))
    return None


class Compilation:
    """Programs that are being compiled into `folder`, until `stop`, or until nobody needs this any more."""

    def __init__(self, folder: Path, names: Sequence[str], processes: int):
        """Starts at most so many processes, for those of `names` that are not in the folder."""
        self.folder, self.names = folder, [name for name in names if not (folder / f"{name}.ptx").exists()]
        self._until = time.monotonic() + _SECONDS
        self._running: dict[Path, subprocess.Popen[bytes]] = {}  # by the folder that each one fills
        self.stop = weakref.finalize(self, _stop, self._running)
        count = min(processes, len(self.names))
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            part = Path(tempfile.mkdtemp(prefix=".", dir=folder))
            self._running[part] = subprocess.Popen(
                python_command(_CODE, *self.names[number::count]),
                env={**os.environ, _VARIABLE: str(part)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def wait(self) -> None:
        """Waits until the programs are in the folder; MLX compiles missing ones when it needs them."""
        for part, process in self._running.items():
            with suppress(OSError, subprocess.TimeoutExpired):  # no space, or too long
                if process.wait(max(self._until - time.monotonic(), 0.0)) == 0:
                    _move(part, self.folder)
        self.stop()


def _move(source: Path, target: Path) -> None:
    """Moves programs from folder to folder, each one's code last: others see only complete ones."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.suffix == ".ptx"):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def _stop(running: dict[Path, subprocess.Popen[bytes]]) -> None:
    for part, process in running.items():
        process.kill()
        process.wait()
        shutil.rmtree(part, ignore_errors=True)
    running.clear()
