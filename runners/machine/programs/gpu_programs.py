"""Keeps MLX's compiled CUDA programs in the user's cache folder, and compiles them in advance in
parallel processes.

Importing this module does not import MLX.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from runners.errors import UserError
from runners.files.own_folder import kept_folder
from runners.files.tensor_files import stated_dtype
from runners.machine.bounded_process import python_command

if TYPE_CHECKING:
    from runners.config.loading import Config

_LOCKS: list[IO[str]] = []  # the lock on this process's folder, held until the process ends
_VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads this variable when it first compiles a program
_FOLDERS = "gpu-programs"  # in the user's cache
_SECONDS = 120  # for all programs; MLX compiles the missing ones when it needs them
_CODE = (
    "from grpo_fn.backends import compile_cuda_program as compiled; [*map(compiled, sys.argv[1:])]"
)


def keep_programs(mlx_version: str, architecture: str) -> None:
    """Sets a folder in the user's cache where MLX keeps its compiled programs. A user's setting is
    kept.

    Each version, GPU and running process has its own folder, because home folders may be shared and
    MLX writes programs in place, so a second process could read an incomplete program. A new folder
    starts with the programs from the other folders.
    """
    wish = os.environ.get(_VARIABLE)
    # a value in _FOLDERS is inherited from the parent process
    if _LOCKS or (wish and Path(wish).parent.name != _FOLDERS):
        return
    stem = f"mlx-{mlx_version}-{architecture or 'gpu'}-"
    # if no folder can be created, MLX keeps programs in the temporary folder
    os.environ.pop(_VARIABLE, None)
    with suppress(OSError, UserError):
        for number in itertools.count():
            own = kept_folder(_FOLDERS, f"{stem}{number}")
            lock = (own / ".lock").open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            os.environ[_VARIABLE] = str(own)
            _LOCKS.append(lock)
            break
        for code in own.rglob("*.ptx"):
            if not _is_whole(code):
                code.unlink()
        for folder in own.parent.glob(f"{stem}*"):
            for code in filter(_is_whole, folder.rglob("*.ptx")):
                for path in (code.with_suffix(".cu"), code.with_suffix(".txt"), code):
                    place = own / path.relative_to(folder)
                    place.parent.mkdir(exist_ok=True)
                    with suppress(FileExistsError, FileNotFoundError):
                        os.link(path, place)


def _is_whole(code: Path) -> bool:
    """Returns whether a program was written completely. An incomplete program, left by a killed
    process, would end later runs. MLX writes a program's code, its names and its source, in this
    order.
    """
    source = code.with_suffix(".cu")
    return source.exists() and source.stat().st_size > 0


def compile_ahead(config: Config, backend: str, memory: int, cores: int) -> Compilation | None:
    """Starts compiling a run's programs before any other file is read. Only on CUDA.

    A model with an unknown dtype is assumed to use bfloat16; MLX compiles other programs when it
    needs them. Each process needs one of the `cores` and about a gigabyte of the GPU's `memory` (in
    bytes); at most one process per 4 GiB is started. The processes end with this process, or when
    the compilation is finished.
    """
    from grpo_fn.backends import cuda_programs, enabled

    folder = os.environ.get(_VARIABLE, "")
    off = "programs_ahead" in config.system.disable or not enabled("programs_ahead")
    if backend != "cuda" or not folder or off:
        return None
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = stated_dtype(Path(config.model.path).expanduser()) or "bfloat16"
    with suppress(OSError):  # no space, or too many processes: MLX compiles them when it needs them
        return Compilation(Path(folder), cuda_programs(dtype), max(min(cores, memory >> 32), 1))
    return None


class Compilation:
    """Compiles programs into `folder` until `stop` is called or this object is deleted."""

    def __init__(self, folder: Path, names: Sequence[str], processes: int):
        """Starts at most `processes` processes, which compile those of the `names` that are not in
        the folder.
        """
        self.folder = folder
        self.names = [name for name in names if not (folder / f"{name}.ptx").exists()]
        self._until = time.monotonic() + _SECONDS
        self._running: dict[Path, subprocess.Popen[bytes]] = {}  # by the folder that each one fills
        self.stop = weakref.finalize(self, _stop, self._running)
        folder.mkdir(parents=True, exist_ok=True)
        count = min(processes, len(self.names))
        for number in range(count):
            part = Path(tempfile.mkdtemp(prefix=".", dir=folder))
            self._running[part] = subprocess.Popen(
                python_command(_CODE, *self.names[number::count]),
                env={**os.environ, _VARIABLE: str(part)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def wait(self) -> None:
        """Waits until the programs are in the folder. MLX compiles missing programs later, when it
        needs them.
        """
        for part, process in self._running.items():
            with suppress(OSError, subprocess.TimeoutExpired):  # no space, or too long
                if process.wait(max(self._until - time.monotonic(), 0.0)) == 0:
                    _move(part, self.folder)
        self.stop()


def _move(source: Path, target: Path) -> None:
    """Moves programs between folders. Each program's code is moved last, so that other processes
    only see complete programs.
    """
    files = filter(Path.is_file, source.rglob("*"))
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
