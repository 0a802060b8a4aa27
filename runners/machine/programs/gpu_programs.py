"""MLX's compiled CUDA programs: kept in the user's cache folder, and compiled ahead by parallel processes.

Importing this module does not import MLX.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from runners.files.cache_folder import cache_folder
from runners.files.tensor_files import stated_dtype

if TYPE_CHECKING:
    from runners.config.loading import Config

_VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads it when it compiles for the first time
_PREFIX = "grpo-fn-programs-"  # of a folder that belongs to one process
_SECONDS = 120  # for all of them; MLX compiles the missing ones later, when it needs them
_at_exit = atexit.register
_cache_of: dict[Path, Path] = {}  # this process's folder -> the permanent one
_CODE = """
import sys
from grpo_fn.backends import compile_cuda_program
for name in sys.argv[1:]:
    compile_cuda_program(name)
"""


def keep_programs(mlx_version: str, architecture: str) -> None:
    """Sets the folder where MLX keeps its compiled programs from now on; a setting of the user stays.

    The folder belongs to this process. It starts with copies of the programs in the user's cache, and at the
    end new programs are copied to the cache. MLX writes its files in place and uses every file that it finds.
    In a shared folder a process could read a half-written file, and an incomplete file would stop every later
    run. Each version and each GPU has its own part of the cache, because home folders may be shared.
    """
    given = os.environ.get(_VARIABLE, "")
    if given and (Path(given) in _cache_of or not Path(given).name.startswith(_PREFIX)):
        return  # set by an earlier call or by the user; with the prefix it is a parent process's
    cache = cache_folder() / "gpu-programs" / f"mlx-{mlx_version}-{architecture or 'gpu'}"
    try:
        scratch = tempfile.TemporaryDirectory(prefix=_PREFIX)
    except OSError:  # no space: MLX compiles without keeping programs
        os.environ.pop(_VARIABLE, None)
        return
    own = Path(scratch.name)
    _cache_of[own] = cache
    os.environ[_VARIABLE] = str(own)
    with contextlib.suppress(OSError):  # programs are compiled again
        _copy(cache, own, _programs(cache))
    _at_exit(_end, scratch, cache, _programs(own))


def _programs(folder: Path) -> list[Path]:
    """Complete programs of a folder, as paths relative to it; each program's code is last."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    whole = {path.with_suffix("") for path in found if path.suffix == ".ptx"}
    wanted = [path for path in found if path.with_suffix("") in whole]
    return sorted(wanted, key=lambda path: path.suffix == ".ptx")


def _copy(source: Path, target: Path, places: Iterable[Path]) -> None:
    """Copies files from folder to folder, so that others see only complete files."""
    for place in places:
        file = target / place
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".", suffix=".part", delete=False) as part:
            part.write((source / place).read_bytes())
        os.replace(part.name, file)


def _end(scratch: tempfile.TemporaryDirectory[str], cache: Path, before: Sequence[Path]) -> None:
    """Keeps the programs that MLX has compiled, and removes the process's folder."""
    own = Path(scratch.name)
    with contextlib.suppress(OSError):  # no space, or the folder is gone: programs are compiled again
        _copy(own, cache, (place for place in _programs(own) if place not in set(before)))
    scratch.cleanup()


def compile_ahead(backend: str, dtype: str, memory: int, cores: int) -> Compilation:
    """Starts to compile the programs of a run in this dtype ("auto": bfloat16); only on CUDA.

    Each process needs one of the `cores` and about a gigabyte of the GPU's `memory` (bytes). They end with
    this process, or with the compilation.
    """
    if backend != "cuda":
        return Compilation(Path(), (), 0)
    from grpo_fn.backends import cuda_programs, enabled

    folder = os.environ.get(_VARIABLE, "")
    if not enabled("programs_ahead") or not folder:
        return Compilation(Path(), (), 0)
    wanted = cuda_programs("bfloat16" if dtype == "auto" else dtype)
    return Compilation(Path(folder), wanted, max(min(cores, memory >> 32), 1))


def compile_early(config: Config, backend: str, memory: int, cores: int) -> Compilation | None:
    """As `compile_ahead`, before anything of the run is read, if the dtype is known; else None."""
    model, folder = config.model, Path(config.model.path).expanduser()
    dtype = model.dtype if model.dtype != "auto" else stated_dtype(folder)
    if backend != "cuda" or not dtype or "programs_ahead" in config.system.disable:
        return None
    return compile_ahead(backend, dtype, memory, cores)


class Compilation:
    """Programs that are being compiled into `folder`; a context manager that ends the remaining processes."""

    def __init__(self, folder: Path, names: Sequence[str], processes: int):
        """Starts at most so many processes, for those of `names` that are not in the folder."""
        self.folder, self.names = folder, [name for name in names if not (folder / f"{name}.ptx").exists()]
        self._until = time.monotonic() + _SECONDS
        self._faults: list[str] = []
        self._running: list[subprocess.Popen[str]] = []
        self._parts: list[Path] = []  # a folder of each process
        self._scratch = ExitStack()
        count = min(processes, len(self.names))
        try:
            for number in range(count):
                part = tempfile.TemporaryDirectory(prefix="grpo-programs-")
                self._parts.append(Path(self._scratch.enter_context(part)))
                self._running.append(_compile(self._parts[-1], self.names[number::count]))
        except OSError as error:  # no space, or too many processes
            self._faults.append(error.strerror or str(error))
        self._stop = weakref.finalize(self, _stop, self._running, self._scratch)

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def wait(self) -> list[str]:
        """Waits until all programs are in the folder; returns lines on those that are not, and why."""
        for process in self._running:
            try:
                _, output = process.communicate(timeout=max(self._until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                self._faults.append(f"it took more than {_SECONDS} s")
                continue
            if process.returncode:
                self._faults.append((output.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
        lines = [
            f"some GPU programs were not compiled ahead: {fault}" for fault in dict.fromkeys(self._faults)
        ]
        for folder in filter(None, (self.folder, _cache_of.get(self.folder))):
            with contextlib.suppress(OSError):
                for part in self._parts:
                    _copy(part, folder, _programs(part))
        return lines


def _stop(running: list[subprocess.Popen[str]], scratch: ExitStack) -> None:
    for process in running:
        process.kill()
        process.communicate()
    running.clear()
    scratch.close()


def _compile(folder: Path, names: Sequence[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, *names],
        env={**os.environ, _VARIABLE: str(folder), "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
