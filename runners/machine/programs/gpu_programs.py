"""What MLX compiles for CUDA, kept in the user's cache folder and compiled ahead by processes side by side.

Importing this module imports no MLX.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runners.files.cache_folder import cache_folder

if TYPE_CHECKING:
    from runners.machine.startup import Platform

_VARIABLE = "MLX_PTX_CACHE_DIR"  # MLX reads it when it compiles for the first time
_SECONDS = 120  # for all of them; MLX compiles what is missing then when it needs it
_CODE = """
import sys
from grpo_fn.backends.cuda.programs import compile_program
for name in sys.argv[1:]:
    compile_program(name)
"""


def keep_programs(mlx_version: str, architecture: str) -> Path:
    """The folder where MLX keeps what it compiles from now on; the user's own setting stays.

    It outlives the temporary folder that MLX takes otherwise. Programs of other versions and other GPUs
    (homes are shared) do not lie in it.
    """
    mine = cache_folder() / "programs" / f"mlx-{mlx_version}-{architecture or 'gpu'}"
    return Path(os.environ.setdefault(_VARIABLE, str(mine)))


def compile_ahead(platform: Platform, dtype: str, memory: int) -> Compilation:
    """Starts to compile what a run in this dtype ("auto": bfloat16) needs; nothing on other backends.

    A process takes a core, and about a gigabyte of the GPU's `memory` (bytes).
    """
    if platform.backend != "cuda":
        return Compilation(Path(), (), 0)
    from grpo_fn.backends import cuda_programs, enabled

    if not enabled("programs_ahead"):
        return Compilation(Path(), (), 0)
    wanted = cuda_programs("bfloat16" if dtype == "auto" else dtype)
    return Compilation(Path(os.environ[_VARIABLE]), wanted, max(min(platform.cores, memory >> 32), 1))


class Compilation:
    """Programs that are being compiled, into `folder`; a context manager that ends what still goes on."""

    def __init__(self, folder: Path, names: Sequence[str], processes: int):
        """Starts at most so many processes, for those of `names` that the folder does not have."""
        missing = [name for name in names if not self._tried(folder, name)]
        self.folder, self.names = folder, missing
        self._until = time.monotonic() + _SECONDS
        self._faults: list[str] = []
        self._running: list[tuple[subprocess.Popen[str], list[str]]] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        count = min(processes, len(missing))
        try:
            if count:
                self._scratch = tempfile.TemporaryDirectory(prefix="grpo-programs-")
            for number in range(count):
                share = missing[number::count]
                self._running.append((self._start(number, share), share))
        except OSError as error:  # no room, or no more processes
            self._faults.append(error.strerror or str(error))

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _names in self._running:
            process.kill()
            process.communicate()
        self._running = []
        if self._scratch:
            self._scratch.cleanup()

    def wait(self) -> list[str]:
        """Waits until all is compiled and in the folder; lines on what is not, and why."""
        faults, done = list(self._faults), []
        for process, names in self._running:
            try:
                _, said = process.communicate(timeout=max(self._until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                faults.append(f"it took more than {_SECONDS} s")
                continue
            if process.returncode:
                faults.append((said.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
            else:
                done += names
        try:
            self._keep(done)
        except OSError as error:
            faults.append(f"{self.folder}: {error.strerror or error}")
        return [f"GPU programs were not all compiled ahead: {fault}" for fault in dict.fromkeys(faults)]

    @staticmethod
    def _tried(folder: Path, name: str) -> bool:
        return (folder / f"{name}.ptx").exists() or (folder / f"{name}.unknown").exists()

    def _start(self, number: int, names: Sequence[str]) -> subprocess.Popen[str]:
        assert self._scratch
        own = Path(self._scratch.name) / str(number)
        own.mkdir()
        return subprocess.Popen(
            [sys.executable, "-c", _CODE, *names],
            env={**os.environ, _VARIABLE: str(own), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _keep(self, done: Sequence[str]) -> None:
        """Moves what was compiled into the folder: whole files, each program's code last.

        MLX has another name for what processes have `done` and left no file of; it is not tried again.
        """
        if not self._scratch:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        found = sorted(Path(self._scratch.name).glob("*/*"), key=lambda file: file.suffix == ".ptx")
        for file in found:
            part = self.folder / f".{file.name}.{os.getpid()}"
            part.write_bytes(file.read_bytes())
            os.replace(part, self.folder / file.name)
        for name in done:
            if not self._tried(self.folder, name):
                (self.folder / f"{name}.unknown").touch()
